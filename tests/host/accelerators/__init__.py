"""Accelerators without hardware: stand-ins for NVML and npu-smi, asked by the real children."""
