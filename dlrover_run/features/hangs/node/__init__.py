"""What a node does about its workers that hang."""
