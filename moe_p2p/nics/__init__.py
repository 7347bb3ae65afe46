"""Which NICs and which transport a rank uses: topology of the machine, then the choice."""
