# SPDX-License-Identifier: Apache-2.0
# Headers, library and a package for find_package(mortar CONFIG), which gives mortar::mortar.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mortar)

install(TARGETS mortar EXPORT mortar_targets)
install(FILES ${MORTAR_HIGHWAY_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/mortar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT mortar_targets NAMESPACE mortar:: DESTINATION ${package_dir})

file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/mortar-config.cmake @ONLY CONTENT
  "include(\"\${CMAKE_CURRENT_LIST_DIR}/mortar_targets.cmake\")\n")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mortar-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mortar-config.cmake
  ${PROJECT_BINARY_DIR}/mortar-config-version.cmake DESTINATION ${package_dir})
