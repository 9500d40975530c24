//! Traces: where a call comes from reaches its app.

pub mod context;
