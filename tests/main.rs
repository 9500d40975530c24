//! The integration tests: a real server on port 0, real sockets, real clients.
