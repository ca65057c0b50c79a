"""What reads finished graphs: memory, operations, estimates, ambiguity, pictures, what has changed."""
