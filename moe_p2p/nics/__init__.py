"""Which NICs a rank uses: what the machine has, and which transport carries its writes."""
