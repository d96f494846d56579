"""How much memory a task may take: who holds it to that, and how its end for memory is told from any other."""
