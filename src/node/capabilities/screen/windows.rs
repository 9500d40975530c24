//! The desktop of Windows.

use image::{DynamicImage, RgbImage, RgbaImage};
use tokio_util::sync::CancellationToken;
use win_screenshot::capture::capture_display;
use winsafe::prelude::*;
use winsafe::{GetSystemMetrics, HDC, co};

use super::look::{Error, Monitor, choose, look};
use crate::node::capabilities::media::Failure;
use crate::node::capabilities::media::ffmpeg::Source;

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

    /// What a display shows, always without the pointer.
    pub(super) async fn capture(
        &self,
        index: u32,
        _with_pointer: bool,
        cancel: &CancellationToken,
    ) -> Result<RgbImage, Failure> {
        Ok(look(cancel, move |_| capture(index)).await?.0)
    }

    /// What ffmpeg is to read.
    pub(super) async fn source(&self, index: u32, fps: f64, cancel: &CancellationToken) -> Result<Source, Failure> {
        let (_, monitor) = look(cancel, move |_| capture(index)).await?;
        let source = Source::new("gdigrab", "desktop").with("framerate", fps);
        let source = source.with("offset_x", monitor.x).with("offset_y", monitor.y);
        Ok(source.with("video_size", format_args!("{}x{}", monitor.width, monitor.height)))
    }
}

/// What the display of this number shows, and where it is.
fn capture(index: u32) -> Result<(RgbImage, Monitor), Error> {
    // Comes first: only a process that has captured is told of places in real pixels.
    let desktop = capture_display().map_err(|error| format!("{error:?}"))?;
    let (left, top) = (GetSystemMetrics(co::SM::XVIRTUALSCREEN), GetSystemMetrics(co::SM::YVIRTUALSCREEN));
    let desktop = RgbaImage::from_raw(desktop.width, desktop.height, desktop.pixels).ok_or("pixels are missing")?;
    let monitor = monitor(index)?;
    let (x, y) = (u32::try_from(monitor.x - left)?, u32::try_from(monitor.y - top)?);
    let part = DynamicImage::ImageRgba8(desktop).crop_imm(x, y, monitor.width, monitor.height);
    Ok((part.into_rgb8(), monitor))
}

fn monitor(index: u32) -> Result<Monitor, Error> {
    let mut monitors = Vec::new();
    HDC::NULL.EnumDisplayMonitors(None, |monitor, _, _| {
        monitors.extend(monitor.GetMonitorInfo());
        true
    })?;
    monitors.sort_by_key(|monitor| monitor.dwFlags != co::MONITORINFOF::PRIMARY);
    let places = monitors.iter().map(|monitor| {
        let place = monitor.rcMonitor;
        let (width, height) = (u32::try_from(place.right - place.left)?, u32::try_from(place.bottom - place.top)?);
        Ok(Monitor { x: place.left, y: place.top, width, height })
    });
    let places = places.collect::<Result<Vec<_>, Error>>()?;
    choose(&places, index).ok_or_else(|| "there is no display".into())
}

/// ffmpeg cannot hear what the speakers play.
pub(super) fn sound() -> Option<Source> {
    None
}
