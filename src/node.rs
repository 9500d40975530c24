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

use std::path::Path;
use std::sync::Arc;

use approvals::location::Location as PolicyLocation;
use capabilities::app::App;
use capabilities::browser::{self, BrowserProxy};
use capabilities::camera::{self, Camera};
use capabilities::canvas::{self, Canvas};
use capabilities::device::Device;
use capabilities::exec::{self, Exec};
use capabilities::location::{self, Location};
use capabilities::screen::{self, Screen};
use capabilities::stt::{self, Stt};
use capabilities::system::System;
use capabilities::tts::{self, Tts};
use capabilities::{Exposure, Registry};
use settings::Settings;
use status::Status;

/// What capabilities are made with.
#[derive(Debug)]
pub struct Setup {
    /// What is switched on.
    pub settings: Settings,
    /// How the transports are.
    pub status: Arc<Status>,
    /// Where it is kept which programs may be run.
    pub approvals: PolicyLocation,
    /// The screen.
    pub screen: screen::Options,
    /// The cameras.
    pub camera: camera::Options,
    /// The position.
    pub location: location::Options,
    /// The browser-control host, if there is one.
    pub browser: Option<browser::Host>,
    /// The voice.
    pub tts: tts::Options,
    /// The ear.
    pub stt: stt::Options,
    /// The canvas.
    pub canvas: canvas::Options,
}

impl Setup {
    /// The defaults, for a node whose files are in this folder.
    pub fn in_folder(folder: &Path) -> Self {
        Setup {
            settings: Settings::default(),
            status: Arc::default(),
            approvals: PolicyLocation::in_folder(folder),
            screen: screen::Options::default(),
            camera: camera::Options::default(),
            location: location::Options::default(),
            browser: None,
            tts: tts::Options::default(),
            stt: stt::Options::default(),
            canvas: canvas::Options::default(),
        }
    }
}

/// The capabilities of a node, in the order in which they are listed.
pub fn registry(setup: Setup) -> Registry {
    let registry = Registry::new();
    let is_on = |name| setup.settings.is_enabled(name);
    registry.add(System::default(), Exposure::Everywhere);
    let options = exec::Options { is_run_enabled: is_on("NodeSystemRunEnabled") };
    registry.add(Exec::new(setup.approvals, options), Exposure::Everywhere);
    if is_on("NodeScreenEnabled") {
        registry.add(Screen::new(setup.screen), Exposure::Everywhere);
    }
    if is_on("NodeCameraEnabled") {
        registry.add(Camera::new(setup.camera), Exposure::Everywhere);
    }
    if is_on("NodeCanvasEnabled") {
        registry.add(Canvas::new(setup.canvas), Exposure::Everywhere);
    }
    if is_on("NodeLocationEnabled") {
        registry.add(Location::new(setup.location), Exposure::Everywhere);
    }
    if is_on("NodeBrowserProxyEnabled") {
        registry.add(BrowserProxy::new(setup.browser), Exposure::Everywhere);
    }
    if is_on("NodeTtsEnabled") {
        registry.add(Tts::new(setup.tts), Exposure::Everywhere);
    }
    if is_on("NodeSttEnabled") {
        registry.add(Stt::new(setup.stt), Exposure::Everywhere);
    }
    registry.add(Device, Exposure::Everywhere);
    registry.add(App::new(setup.status, setup.settings), Exposure::LocalOnly);
    registry
}
