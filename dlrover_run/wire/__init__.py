"""What a master and its nodes say to each other, and how each proves to the other that it belongs to the job."""
