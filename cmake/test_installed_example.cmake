# SPDX-License-Identifier: Apache-2.0
# Installs the build tree BUILD, then configures, builds and runs examples/cpp against that copy:
#   cmake -DBUILD=... -DSOURCE=... -DCOMPILER=... -P test_installed_example.cmake
function(must_run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "failed with ${status}: ${command}")
  endif()
endfunction()

set(prefix ${BUILD}/installed)
set(example ${BUILD}/installed_example)
file(REMOVE_RECURSE ${prefix} ${example})
must_run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
must_run(${CMAKE_COMMAND} -G Ninja -S ${SOURCE}/examples/cpp -B ${example}
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix})
must_run(${CMAKE_COMMAND} --build ${example})
must_run(${example}/lora_example)
