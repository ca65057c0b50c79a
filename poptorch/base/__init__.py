"""What every part of poptorch may use, and what knows nothing of models: messages, types, structures, replicas."""
