"""What a master and its nodes send each other, how they authenticate, and how gRPC is set up."""
