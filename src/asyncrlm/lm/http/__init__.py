"""What goes over the wire, whoever's it is: connections, keys and their hosts, streams, failures told apart."""
