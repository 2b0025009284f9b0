# libmtmd, llama.cpp's part for pictures, alone: against libraries of the same version that are installed already. CMake
# reads this file in place of llama-cpp-python's own build (CMAKE_PROJECT_llama_cpp_INCLUDE, with LLAMA_BUILD off).
# SPANMESH_LIBRARIES names the folder of those libraries.
set(SOURCE "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp")
set(BUILD_SHARED_LIBS ON)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

foreach(name ggml-base ggml llama)
  set(library "${SPANMESH_LIBRARIES}/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  if(NOT EXISTS "${library}")
    message(FATAL_ERROR "${library} is missing: libmtmd is linked with it; install llama-cpp-python again")
  endif()
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${library}"
    INTERFACE_INCLUDE_DIRECTORIES "${SOURCE}/include;${SOURCE}/ggml/include")
endforeach()
set_target_properties(ggml PROPERTIES INTERFACE_LINK_LIBRARIES ggml-base
  INTERFACE_COMPILE_DEFINITIONS "GGML_SHARED;GGML_BACKEND_SHARED")

# Warnings about its sources are llama.cpp's own affair.
function(llama_add_compile_flags)
endfunction()
add_subdirectory("${SOURCE}/vendor" vendor)
add_subdirectory("${SOURCE}/tools/mtmd" mtmd)

# One file, found beside the libraries that it needs, in whichever folder of them it is.
set_property(TARGET mtmd PROPERTY VERSION)
set_property(TARGET mtmd PROPERTY SOVERSION)
set_target_properties(mtmd PROPERTIES BUILD_WITH_INSTALL_RPATH TRUE
  INSTALL_RPATH "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>")
install(TARGETS mtmd LIBRARY DESTINATION "${SKBUILD_PLATLIB_DIR}/llama_cpp/lib")
