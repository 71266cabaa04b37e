# The CPU expert kernel, part of _native. Each instruction set is a file with flags of its own; the rest of the module,
# and the choice between them, runs on any CPU.
target_sources(_native PRIVATE
  native/experts_cpu/dispatch.cpp
  native/experts_cpu/experts.cpp
  native/experts_cpu/layout.cpp
  native/experts_cpu/path_amx.cpp
  native/experts_cpu/path_avx2.cpp
  native/experts_cpu/path_avx512.cpp
  native/experts_cpu/path_avx512_bf16.cpp
  native/experts_cpu/path_scalar.cpp
  native/experts_cpu/thread_pool.cpp
  native/experts_cpu/tile_access.cpp)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  include(CheckCXXCompilerFlag)
  set_source_files_properties(native/experts_cpu/path_avx2.cpp PROPERTIES COMPILE_OPTIONS
    "-fno-lto;-mavx2;-mfma;-mf16c")
  # GCC 12 warns about its own AVX512 header; link time optimisation would undo the separation.
  set(avx512_flags -fno-lto -Wno-uninitialized -Wno-maybe-uninitialized -mavx512f -mavx512bw -mavx512vl -mfma)
  check_cxx_compiler_flag("-mavx512f -mavx512bw -mavx512vl" FFN_FAAS_HAS_AVX512)
  if(FFN_FAAS_HAS_AVX512)
    set_source_files_properties(native/experts_cpu/path_avx512.cpp PROPERTIES COMPILE_OPTIONS "${avx512_flags}")
    check_cxx_compiler_flag("-mavx512bf16" FFN_FAAS_HAS_AVX512_BF16)
    if(FFN_FAAS_HAS_AVX512_BF16)
      set_source_files_properties(native/experts_cpu/path_avx512_bf16.cpp PROPERTIES
        COMPILE_OPTIONS "${avx512_flags};-mavx512bf16")
      check_cxx_compiler_flag("-mamx-tile -mamx-bf16" FFN_FAAS_HAS_AMX)
      if(FFN_FAAS_HAS_AMX)
        set_source_files_properties(native/experts_cpu/path_amx.cpp PROPERTIES
          COMPILE_OPTIONS "${avx512_flags};-mavx512bf16;-mamx-tile;-mamx-bf16")
      endif()
    endif()
  endif()
endif()
