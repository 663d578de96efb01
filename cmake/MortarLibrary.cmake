# SPDX-License-Identifier: Apache-2.0
# mortar: the shared library with the public API. mortar_objects: its compiled sources, from which
# the binding and the library for the tests are linked too.
find_package(OpenMP REQUIRED COMPONENTS CXX)
include(MortarHighway)
find_package(nlohmann_json REQUIRED)
# Keys of PEFT's rank_pattern and alpha_pattern are regular expressions. Static where there is one,
# so that libmortar needs no further file.
find_path(PCRE2_INCLUDE_DIR pcre2.h REQUIRED)
find_library(PCRE2_LIBRARY NAMES libpcre2-8.a pcre2-8 REQUIRED)

set(patterns src/core/*.cpp)
foreach(family IN LISTS MORTAR_FAMILIES)
  list(APPEND patterns src/${family}/*.cpp src/${family}/cpu/*.cpp
    src/${family}/train/*.cpp src/${family}/train/cpu/*.cpp)
  if(MORTAR_HAS_CUDA)
    list(APPEND patterns src/${family}/cuda/*.cu src/${family}/train/cuda/*.cu)
  endif()
endforeach()
file(GLOB sources CONFIGURE_DEPENDS ${patterns})

mortar_cuda_sources(${sources})

add_library(mortar_objects OBJECT ${sources})
target_include_directories(mortar_objects PUBLIC include PRIVATE src)
target_link_libraries(mortar_objects
  PUBLIC OpenMP::OpenMP_CXX hwy::hwy ${PCRE2_LIBRARY} PRIVATE nlohmann_json::nlohmann_json)
target_include_directories(mortar_objects PRIVATE ${PCRE2_INCLUDE_DIR})
mortar_enable_warnings(mortar_objects)
if(MORTAR_HAS_CUDA)
  target_compile_definitions(mortar_objects PUBLIC MORTAR_HAS_CUDA=1)
  target_link_libraries(mortar_objects PUBLIC CUDA::cudart_static)
  # Compressed, device code takes a ninth of the room. The driver unpacks a file's at its first use:
  # 0.1 to 1.5 ms, 10 ms for all of one architecture.
  target_compile_options(mortar_objects PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v>
    $<$<COMPILE_LANGUAGE:CUDA>:$<IF:$<BOOL:${MORTAR_COMPRESS}>,-Xfatbin=-compress-all,--no-compress>>)
endif()

# mortar_link_objects(target [version script]): links all of mortar_objects into a shared library
# that keeps the symbols of static libraries, and all those outside the script, to itself.
function(mortar_link_objects target)
  target_link_libraries(${target} PRIVATE mortar_objects)
  target_link_options(${target} PRIVATE LINKER:--exclude-libs,ALL)
  if(NOT MORTAR_SANITIZE)  # whose symbols the main program brings
    target_link_options(${target} PRIVATE LINKER:-z,defs)
  endif()
  if(ARGN)
    target_link_options(${target} PRIVATE LINKER:--version-script=${ARGN})
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${ARGN})
  endif()
endfunction()

add_library(mortar SHARED)
add_library(mortar::mortar ALIAS mortar)
mortar_link_objects(mortar ${PROJECT_SOURCE_DIR}/cmake/mortar.map)
target_compile_features(mortar PUBLIC cxx_std_20)
target_include_directories(mortar PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
set_target_properties(mortar PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR} LINKER_LANGUAGE CXX)
