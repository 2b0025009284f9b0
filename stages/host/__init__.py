"""What a host tells of itself with llama.cpp loaded: reports, profiles and crash logs."""
