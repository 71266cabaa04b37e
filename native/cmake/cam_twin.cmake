# The CPU twin of the Async CAM operators, over torch's stable ABI as the Attention ops are. Loading it registers nothing
# (native/cam_twin/library.cpp). Included where ${torch_dir} is known to hold a usable torch.
add_library(_cam_twin MODULE
  native/cam_twin/checks.cpp
  native/cam_twin/group.cpp
  native/cam_twin/grouped_matmul.cpp
  native/cam_twin/library.cpp
  native/cam_twin/ops_exchange.cpp
  native/cam_twin/ops_layered.cpp
  native/cam_twin/planner.cpp
  native/cam_twin/region.cpp
  native/cam_twin/rows.cpp
  native/cam_twin/settings.cpp)
set_target_properties(_cam_twin PROPERTIES PREFIX "" OUTPUT_NAME cam_twin)
target_compile_definitions(_cam_twin PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
# Products are rounded before they are added, as the oracle has it; aarch64 would fuse them.
target_compile_options(_cam_twin PRIVATE -ffp-contract=off)
target_include_directories(_cam_twin PRIVATE native)
target_include_directories(_cam_twin SYSTEM PRIVATE "${torch_dir}/include")
target_link_libraries(_cam_twin PRIVATE "${torch_dir}/lib/libtorch_cpu.so")
install(TARGETS _cam_twin LIBRARY DESTINATION ffn_faas/_lib)
