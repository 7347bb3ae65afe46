"""How ranks meet: a store, one configuration that all agree on, and what they need of /dev/shm."""
