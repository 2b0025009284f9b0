# Adds the kernel of attention_rows.cpp to each of ggml's libraries for processors, and directs ggml's dispatcher to it.
# Read where the project is ggml; the libraries are there at the end of its folder.
#
# Where llama.cpp's sources are not as expected, neither is done: attention is then ggml's own, and one line says so.

set(ATTENTION_FOLDER "${CMAKE_CURRENT_LIST_DIR}")

function(leave_attention_to_ggml reason)
  message(STATUS "spanmesh: attention is left to ggml's own kernel: ${reason}")
endfunction()

# What each file must hold: the call, its declaration and definition, and what threads share.
set(ATTENTION_NEEDS
    "ggml-cpu.c|ggml_compute_forward_flash_attn_ext\\(params, tensor\\)"
    "ops.h|void ggml_compute_forward_flash_attn_ext\\("
    "ops.cpp|void ggml_compute_forward_flash_attn_ext\\("
    "ggml-cpu-impl.h|ggml_threadpool_chunk_add"
    "ggml-cpu-impl.h|ggml_threadpool_chunk_set"
    "ggml-cpu-impl.h|ggml_barrier"
    "ggml-cpu-impl.h|use_ref"
    "simd-mappings.h|GGML_CPU_FP16_TO_FP32"
    "../ggml-impl.h|ggml_aligned_malloc")

# Once for all libraries: they are compiled from the same files.
function(direct_dispatcher_to_attention target)
  set(header "${ATTENTION_FOLDER}/attention_rename.h")
  if(MSVC)
    set(ahead "/FI${header}")
  else()
    set(ahead "-include;${header}")
    # Sums must be the same wherever a function is inlined.
    set_property(SOURCE "${ATTENTION_FOLDER}/attention_rows.cpp" TARGET_DIRECTORY ${target}
                 PROPERTY COMPILE_OPTIONS "-ffp-contract=off")
  endif()
  set(dispatcher "${PROJECT_SOURCE_DIR}/src/ggml-cpu/ggml-cpu.c")
  set_property(SOURCE "${dispatcher}" TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS "${ahead}")
  set_property(SOURCE "${dispatcher}" TARGET_DIRECTORY ${target} APPEND PROPERTY OBJECT_DEPENDS "${header}")
endfunction()

function(add_attention)
  find_missing_in_ggml(missing ${ATTENTION_NEEDS})
  if(NOT missing STREQUAL "")
    leave_attention_to_ggml("${missing}")
    return()
  endif()
  find_libraries_of_ggml_cpu(libraries)
  if(libraries STREQUAL "")
    leave_attention_to_ggml("there is no library ggml-cpu")
    return()
  endif()
  list(GET libraries 0 first)
  direct_dispatcher_to_attention(${first})
  foreach(library IN LISTS libraries)
    target_sources(${library} PRIVATE "${ATTENTION_FOLDER}/attention_rows.cpp")
  endforeach()
endfunction()

if(CMAKE_VERSION VERSION_LESS 3.19)
  leave_attention_to_ggml("CMake ${CMAKE_VERSION} is older than 3.19")
else()
  cmake_language(DEFER CALL add_attention)
endif()
