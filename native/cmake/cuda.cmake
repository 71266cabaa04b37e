# The GPU data plane and experts: a plain shared object with a C border that ffn_faas/connectors/m2n_library.py loads.
# Optional: without nvcc the package installs without it and --backend gpu-deepep-m2n says so.
option(FFN_FAAS_CUDA "build the GPU backend when nvcc is found" ON)
set(FFN_FAAS_CUDA_TARGETS "arch=compute_90a,code=sm_90a" CACHE STRING "-gencode values, separated by semicolons")
set(m2n_verbs m2n/attention m2n/ceiling m2n/combine m2n/dispatch m2n/memory m2n/observer m2n/receive m2n/service m2n/wait_any
  experts_gpu/experts experts_gpu/upload experts_gpu/weights)

find_program(FFN_FAAS_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
if(NOT FFN_FAAS_CUDA OR NOT FFN_FAAS_NVCC)
  message(STATUS "ffn_faas: no nvcc, so the GPU backend (gpu-deepep-m2n) is left out of this build")
else()
  message(STATUS "ffn_faas: building the GPU backend with ${FFN_FAAS_NVCC}")
  set(m2n_flags -std=c++17 -O3 -I "${CMAKE_CURRENT_SOURCE_DIR}/native" -cudart static
    -Xcompiler "-fPIC,-fvisibility=hidden,-Wall")
  foreach(target IN LISTS FFN_FAAS_CUDA_TARGETS)
    list(APPEND m2n_flags "-gencode=${target}")
  endforeach()
  file(GLOB m2n_headers CONFIGURE_DEPENDS native/m2n/*.h native/m2n/*.hpp native/m2n/*.cuh native/experts_gpu/*.h
    native/experts_gpu/*.cuh)
  set(m2n_objects)
  foreach(verb IN LISTS m2n_verbs)
    string(REPLACE "/" "_" name "${verb}")
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${name}.o")
    add_custom_command(OUTPUT "${object}"
      COMMAND "${FFN_FAAS_NVCC}" ${m2n_flags} -c "${CMAKE_CURRENT_SOURCE_DIR}/native/${verb}.cu" -o "${object}"
      DEPENDS "native/${verb}.cu" ${m2n_headers} VERBATIM)
    list(APPEND m2n_objects "${object}")
  endforeach()
  set(m2n_library "${CMAKE_CURRENT_BINARY_DIR}/m2n.so")
  add_custom_command(OUTPUT "${m2n_library}"
    COMMAND "${FFN_FAAS_NVCC}" -shared -cudart static -o "${m2n_library}" ${m2n_objects}
    DEPENDS ${m2n_objects} VERBATIM)
  add_custom_target(m2n ALL DEPENDS "${m2n_library}")
  # Not a Python module, so it stands in a folder that nobody walks for modules.
  install(FILES "${m2n_library}" DESTINATION ffn_faas/_lib)
endif()
