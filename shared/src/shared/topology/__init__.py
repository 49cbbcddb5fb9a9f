"""What a cluster is made of, and what moving bytes through it costs."""
