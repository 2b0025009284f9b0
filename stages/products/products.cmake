# Adds llamafile's matrix products to each of ggml's libraries for processors, behind a switch that is off: what computes
# with stages must not have them, since they would break the exact mode for F16 models, and encoders of pictures take
# half as long with them. Read where the project is ggml; the libraries are there at the end of its folder.
#
# Where llama.cpp's sources are not as expected, or it is built with these products anyhow, nothing is added.

set(PRODUCTS_FOLDER "${CMAKE_CURRENT_LIST_DIR}")
# What each file must hold: both calls, the declaration and the definition.
set(PRODUCTS_NEEDS
    "ggml-cpu.c|#if GGML_USE_LLAMAFILE"
    "ggml-cpu.c|!llamafile_sgemm\\(params"
    "llamafile/sgemm.h|bool llamafile_sgemm\\("
    "llamafile/sgemm.cpp|bool llamafile_sgemm\\(")

function(leave_products_out reason)
  message(STATUS "spanmesh: encoders of pictures have ggml's own matrix products: ${reason}")
endfunction()

function(add_products)
  if(GGML_LLAMAFILE)
    leave_products_out("GGML_LLAMAFILE is on")
    return()
  endif()
  find_missing_in_ggml(missing ${PRODUCTS_NEEDS})
  find_libraries_of_ggml_cpu(libraries)
  if(NOT missing STREQUAL "")
    leave_products_out("${missing}")
    return()
  endif()
  if(libraries STREQUAL "")
    leave_products_out("there is no library ggml-cpu")
    return()
  endif()
  list(GET libraries 0 first)
  set(folder "${PROJECT_SOURCE_DIR}/src/ggml-cpu")
  # The C source in which ggml dispatches its operations asks for llamafile's product by another name, which is ours.
  set_property(SOURCE "${folder}/ggml-cpu.c" TARGET_DIRECTORY ${first} APPEND
               PROPERTY COMPILE_DEFINITIONS "GGML_USE_LLAMAFILE=1" "llamafile_sgemm=tiled_products")
  foreach(library IN LISTS libraries)
    target_sources(${library} PRIVATE "${folder}/llamafile/sgemm.cpp" "${PRODUCTS_FOLDER}/tiled_products.cpp")
  endforeach()
endfunction()

if(CMAKE_VERSION VERSION_LESS 3.19)
  leave_products_out("CMake ${CMAKE_VERSION} is older than 3.19")
else()
  cmake_language(DEFER CALL add_products)
endif()
