"""How ranks meet: a store, one configuration that all agree on, and the /dev/shm they need."""
