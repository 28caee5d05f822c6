"""The gRPC server: a repository of models answers the Open Inference Protocol."""
