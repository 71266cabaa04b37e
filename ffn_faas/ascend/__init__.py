"""Backend npu-async-cam: routed experts on Ascend over the Async CAM operators. Never run on a device."""
