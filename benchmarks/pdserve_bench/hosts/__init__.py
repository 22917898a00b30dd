"""Hosts on one machine, to break what lies between them: namespaces, a bridge, links that are cut, slow or lossy."""
