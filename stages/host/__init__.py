"""Host: reports, profiles and crash logs of one host, with llama.cpp loaded."""
