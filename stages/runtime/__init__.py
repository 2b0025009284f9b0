"""llama.cpp as one stage runs it: runtime, hidden-state tap, devices, memory and KV state."""
