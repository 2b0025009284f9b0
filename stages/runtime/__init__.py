"""Runtime: llama.cpp for one stage, with hidden-state tap, devices, memory and KV state."""
