//! The node: what a desktop lends. One registry of capabilities, served to every transport.
//!
//! A *capability* is a category of *commands*; each command is a tool. [`capabilities::Registry`] is the one list of
//! them, and every transport reads it anew at each call, so that what is added later is there at once.

pub mod backoff;
pub mod bridge_client;
pub mod capabilities;
pub mod descriptions;
pub mod filter;
pub mod lend;
pub mod local_mcp;
pub mod private_file;
pub mod settings;
pub mod token;
pub mod upstream;

use capabilities::device::Device;
use capabilities::system::System;
use capabilities::{Exposure, Registry};

/// The capabilities that every node has.
pub fn registry() -> Registry {
    let registry = Registry::new();
    registry.add(System, Exposure::Everywhere);
    registry.add(Device, Exposure::Everywhere);
    registry
}
