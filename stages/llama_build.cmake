# Settings of llama.cpp's build that llama-cpp-python's own CMakeLists.txt would override. CMake reads this file after
# each project() command (CMAKE_PROJECT_INCLUDE).
if(PROJECT_NAME STREQUAL "llama.cpp")
  # llama.cpp's common library (arguments, chat parsers, downloads) serves its own programs: no function of the Python
  # binding is in it, and it takes more than half of the build. A normal variable takes precedence over the cache entry
  # that llama-cpp-python forces to ON.
  set(LLAMA_BUILD_COMMON OFF)
endif()
if(PROJECT_NAME STREQUAL "ggml")
  include("${CMAKE_CURRENT_LIST_DIR}/ggml_sources.cmake")
  include("${CMAKE_CURRENT_LIST_DIR}/attention/attention.cmake")
  include("${CMAKE_CURRENT_LIST_DIR}/products/products.cmake")
endif()
