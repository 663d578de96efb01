# SPDX-License-Identifier: Apache-2.0
# Language level, build type, ccache, sanitizers and run paths.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# Build and install trees run where they are copied to: libraries lie beside what needs them.
set(CMAKE_BUILD_RPATH $ORIGIN $ORIGIN/runtime)
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
set(CMAKE_INSTALL_RPATH $ORIGIN)

find_program(MORTAR_CCACHE ccache)
if(MORTAR_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MORTAR_CCACHE})
endif()

if(MORTAR_SANITIZE)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()
