"""Program plans: sequences of executables dispatched by the host."""
