# SPDX-License-Identifier: Apache-2.0
# Highway: SIMD headers, and a 40 kB shared library that detects the processor. A machine that runs
# Mortar may lack the latter, so a copy lies beside every library of Mortar's.
find_package(hwy REQUIRED)
get_target_property(highway_type hwy::hwy TYPE)
set(MORTAR_HIGHWAY_LIBRARY)
if(NOT highway_type STREQUAL STATIC_LIBRARY)
  get_target_property(highway_location hwy::hwy LOCATION)
  get_filename_component(highway_location ${highway_location} REALPATH)
  string(REGEX REPLACE "(\\.so\\.[0-9]+).*" "\\1" highway_soname ${highway_location})
  cmake_path(GET highway_soname FILENAME highway_soname)
  set(MORTAR_HIGHWAY_LIBRARY ${PROJECT_BINARY_DIR}/runtime/${highway_soname})
  configure_file(${highway_location} ${MORTAR_HIGHWAY_LIBRARY} COPYONLY)
endif()
