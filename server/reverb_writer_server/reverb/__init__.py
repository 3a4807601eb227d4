"""dm-reverb's server, in this process or in a child."""
