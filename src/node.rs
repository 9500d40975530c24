//! The node: what a desktop lends. One registry of capabilities, served to every transport.
//!
//! A *capability* is a category of *commands*; each command is a tool. [`capabilities::Registry`] is the one list of
//! them, and every transport reads it anew at each call, so that what is added later is there at once.

pub mod announce;
pub mod approvals;
pub mod backoff;
pub mod bridge_client;
pub mod capabilities;
pub mod descriptions;
pub mod filter;
pub mod lend;
pub mod lender;
pub mod local_mcp;
pub mod private_file;
pub mod serve;
pub mod settings;
pub mod status;
pub mod token;
pub mod upstream;
pub mod wire;

use std::sync::Arc;

use capabilities::app::App;
use capabilities::canvas::{Canvas, Options as CanvasOptions};
use capabilities::device::Device;
use capabilities::system::System;
use capabilities::{Exposure, Registry};
use settings::Settings;
use status::Status;

/// What capabilities are made with.
#[derive(Debug, Default)]
pub struct Setup {
    /// What is switched on.
    pub settings: Settings,
    /// How the transports are.
    pub status: Arc<Status>,
}

/// The capabilities of a node.
pub fn registry(setup: &Setup) -> Registry {
    let registry = Registry::new();
    registry.add(System, Exposure::Everywhere);
    registry.add(Device, Exposure::Everywhere);
    if setup.settings.is_enabled("NodeCanvasEnabled") {
        registry.add(Canvas::new(CanvasOptions::default()), Exposure::Everywhere);
    }
    registry.add(App::new(Arc::clone(&setup.status), setup.settings.clone()), Exposure::LocalOnly);
    registry
}
