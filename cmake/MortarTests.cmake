# SPDX-License-Identifier: Apache-2.0
# One GoogleTest program per tests/cpp/<name>_test.cpp, linked against a copy of the library that
# exports its internals too.
find_package(GTest REQUIRED)

add_library(mortar_testing SHARED)
mortar_link_objects(mortar_testing)
target_link_libraries(mortar_testing PUBLIC mortar_objects)
set(test_programs)
set_target_properties(mortar_testing PROPERTIES LINKER_LANGUAGE CXX)

file(GLOB test_sources CONFIGURE_DEPENDS tests/cpp/*_test.cpp)
# Tests of families that are not built would not link, nor would the one that asks all families.
file(GLOB not_built RELATIVE ${PROJECT_SOURCE_DIR}/src src/*)
list(REMOVE_ITEM not_built core device ${MORTAR_FAMILIES})
foreach(family IN LISTS not_built)
  list(FILTER test_sources EXCLUDE REGEX "/(${family}|check_view)_[^/]*$")
endforeach()
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  add_executable(${name} ${source})
  target_include_directories(${name} PRIVATE include src tests/cpp)
  target_link_libraries(${name} PRIVATE
    mortar_testing nlohmann_json::nlohmann_json GTest::gtest_main)
  mortar_enable_warnings(${name})
  # A third less time to compile than by -O3; they run as long, as that goes into the library.
  target_compile_options(${name} PRIVATE
    $<$<AND:$<CONFIG:Release>,$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>>:-O1>)
  # GoogleTest is a quarter of a program's time to compile: it is compiled once for all.
  if(test_programs)
    list(GET test_programs 0 first)
    target_precompile_headers(${name} REUSE_FROM ${first})
  else()
    target_precompile_headers(${name} PRIVATE <gtest/gtest.h>)
  endif()
  if(MORTAR_CCACHE)  # what it asks for where headers are precompiled
    set_target_properties(${name} PROPERTIES CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${MORTAR_CCACHE}")
    target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  list(APPEND test_programs ${name})
endforeach()

# What ./run gpu-test needs of a tree, to be carried to a machine with a GPU:
#   cmake --install build/release --component tests --prefix build/gpu --strip
set(carried mortar_testing ${test_programs})
if(TARGET mortar_ffi)
  list(APPEND carried mortar_ffi)
endif()
install(TARGETS ${carried}
  RUNTIME DESTINATION . COMPONENT tests EXCLUDE_FROM_ALL
  LIBRARY DESTINATION . COMPONENT tests EXCLUDE_FROM_ALL)
install(FILES ${MORTAR_HIGHWAY_LIBRARY} DESTINATION . COMPONENT tests EXCLUDE_FROM_ALL)
