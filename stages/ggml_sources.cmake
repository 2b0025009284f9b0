# What is looked up in ggml's sources before kernels are added to its libraries for processors. Read where the project is
# ggml.

# `missing`: the first of the needs that ggml's sources do not meet; empty if all are met. A need is a file of ggml-cpu
# and a regular expression that one of its lines matches: "ggml-cpu.c|ggml_barrier\\(".
function(find_missing_in_ggml missing)
  set(folder "${PROJECT_SOURCE_DIR}/src/ggml-cpu")
  foreach(need IN LISTS ARGN)
    string(REGEX MATCH "^([^|]+)\\|(.+)$" parts "${need}")
    set(file "${CMAKE_MATCH_1}")
    set(pattern "${CMAKE_MATCH_2}")
    set(lines "")
    if(EXISTS "${folder}/${file}")
      file(STRINGS "${folder}/${file}" lines REGEX "${pattern}" LIMIT_COUNT 1)
    endif()
    if(lines STREQUAL "")
      set(${missing} "${file} lacks ${pattern}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${missing} "" PARENT_SCOPE)
endfunction()

# `libraries`: ggml's libraries for processors, one or one for each generation of them.
function(find_libraries_of_ggml_cpu libraries)
  get_property(targets DIRECTORY "${PROJECT_SOURCE_DIR}/src" PROPERTY BUILDSYSTEM_TARGETS)
  set(found "")
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    # The object libraries beside them only tell whether a processor fits.
    if(target MATCHES "^ggml-cpu(-.*)?$" AND NOT type STREQUAL "OBJECT_LIBRARY")
      list(APPEND found ${target})
    endif()
  endforeach()
  set(${libraries} "${found}" PARENT_SCOPE)
endfunction()
