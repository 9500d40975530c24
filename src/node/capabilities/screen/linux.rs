//! The desktop of Linux and its like: an X display, or a Wayland compositor that lets `grim` look.

use std::path::{Path, PathBuf};
use std::time::Duration;

use image::RgbImage;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::look::look;
use super::x11;
use crate::node::capabilities::media::ffmpeg::{Source, sound_server};
use crate::node::capabilities::media::{Failure, picture};
use crate::node::capabilities::program::{self, Bounds, Exit};

/// How long `grim` may take, and how many bytes it may write.
const GRIM_BOUNDS: Bounds = Bounds { time: Duration::from_secs(10), output: 128 * 1024 * 1024 };

/// What shows the desktop.
#[derive(Debug)]
pub(super) enum Desktop {
    /// The X display of this name.
    X11(String),
    /// A Wayland compositor, and where `grim` is. All displays are one picture then.
    Wayland(PathBuf),
}

impl Desktop {
    /// The desktop, if there is one. `display` goes before what the environment says.
    pub(super) fn find(display: Option<&str>) -> Option<Self> {
        let env = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        match display {
            Some(display) => Some(display.to_owned()).filter(|display| !display.is_empty()).map(Desktop::X11),
            // The X display of a Wayland session is for programs that need one, and shows nothing else.
            None if env("WAYLAND_DISPLAY").is_some() => program::find("grim").map(Desktop::Wayland),
            None => env("DISPLAY").map(Desktop::X11),
        }
    }

    /// Whether ffmpeg can read it.
    pub(super) fn is_recordable(&self) -> bool {
        matches!(self, Desktop::X11(_))
    }

    /// What a display shows.
    pub(super) async fn capture(
        &self,
        index: u32,
        with_pointer: bool,
        cancel: &CancellationToken,
    ) -> Result<RgbImage, Failure> {
        match self {
            Desktop::X11(display) => {
                let display = display.clone();
                look(cancel, move |stop| x11::capture(&display, index, with_pointer, stop)).await
            }
            Desktop::Wayland(grim) => capture_wayland(grim, with_pointer, cancel).await,
        }
    }

    /// What ffmpeg is to read.
    pub(super) async fn source(&self, index: u32, fps: f64, cancel: &CancellationToken) -> Result<Source, Failure> {
        let Desktop::X11(display) = self else { return Err(Failure::other("only X displays are recorded")) };
        let name = display.clone();
        let monitor = look(cancel, move |stop| x11::monitor(&name, index, stop)).await?;
        let source = Source::new("x11grab", display).with("framerate", fps);
        let source = source.with("grab_x", monitor.x).with("grab_y", monitor.y);
        Ok(source.with("video_size", format_args!("{}x{}", monitor.width, monitor.height)))
    }
}

async fn capture_wayland(grim: &Path, with_pointer: bool, cancel: &CancellationToken) -> Result<RgbImage, Failure> {
    let mut command = Command::new(grim);
    if with_pointer {
        command.arg("-c");
    }
    // Hardly compressed: it is decoded at once.
    command.args(["-t", "png", "-l", "1", "-"]);
    let ended = program::run(command, b"", GRIM_BOUNDS, cancel).await;
    match ended.exit {
        Exit::Code(Some(0)) if !ended.stdout.is_truncated => picture::decode_png(ended.stdout.bytes).await,
        Exit::Cancelled => Err(Failure::Cancelled),
        _ => Err(Failure::other("grim gave no picture")),
    }
}

/// What the speakers play, if there is a sound server.
pub(super) fn sound() -> Option<Source> {
    sound_server("@DEFAULT_MONITOR@")
}
