"""An embedding model on one host: its file, llama.cpp, gRPC server and Ray actor."""
