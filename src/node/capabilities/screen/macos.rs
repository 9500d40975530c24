//! The desktop of macOS, by means of its own `screencapture`.

use std::time::Duration;

use image::RgbImage;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::node::capabilities::media::ffmpeg::Source;
use crate::node::capabilities::media::scratch::Scratch;
use crate::node::capabilities::media::{Failure, picture};
use crate::node::capabilities::program::{self, Bounds, Exit};

/// How long `screencapture` may take, and how much it may say.
const BOUNDS: Bounds = Bounds { time: Duration::from_secs(10), output: 4096 };

/// The desktop of whoever is logged in.
#[derive(Debug)]
pub(super) struct Desktop;

impl Desktop {
    /// There always is one.
    pub(super) fn find(_: Option<&str>) -> Option<Self> {
        Some(Desktop)
    }

    /// Whether ffmpeg can read it.
    pub(super) fn is_recordable(&self) -> bool {
        true
    }

    /// What a display shows.
    pub(super) async fn capture(
        &self,
        index: u32,
        with_pointer: bool,
        cancel: &CancellationToken,
    ) -> Result<RgbImage, Failure> {
        let scratch = Scratch::new().map_err(Failure::other)?;
        // It names a file of its own for each display, beginning with the primary one.
        let files: Vec<_> = (0..=index).map(|number| scratch.path().join(format!("{number}.png"))).collect();
        let mut command = Command::new("/usr/sbin/screencapture");
        command.args(if with_pointer { &["-x", "-C", "-t", "png"][..] } else { &["-x", "-t", "png"] }).args(&files);
        match program::run(command, b"", BOUNDS, cancel).await.exit {
            Exit::Code(Some(0)) => {}
            Exit::Cancelled => return Err(Failure::Cancelled),
            _ => return Err(Failure::other("screencapture gave no picture")),
        }
        let wanted = files.last().filter(|file| file.exists()).unwrap_or(&files[0]).clone();
        let bytes = tokio::task::spawn_blocking(move || std::fs::read(wanted)).await.map_err(Failure::other)?;
        picture::decode_png(bytes.map_err(Failure::other)?).await
    }

    /// What ffmpeg is to read.
    pub(super) async fn source(&self, index: u32, fps: f64, _: &CancellationToken) -> Result<Source, Failure> {
        Ok(Source::new("avfoundation", format!("Capture screen {index}:none")).with("framerate", fps))
    }
}

/// ffmpeg cannot hear what the speakers play.
pub(super) fn sound() -> Option<Source> {
    None
}
