//! ffmpeg, which reads cameras and screens: single pictures, and videos as MP4.
//!
//! It is found on PATH and runs as a group of its own that ends with the call. A video goes to a file in a folder
//! that nobody else may read and that goes away with the call: an MP4 that can be played while it is still loading
//! cannot be written to a pipe.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::RgbImage;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::scratch::Scratch;
use super::{Failure, picture};
use crate::node::capabilities::program::{self, Bounds, Ended, Exit};

/// The most bytes of a video: in Base64 it still fits into one answer over the bridge.
pub const MAX_VIDEO_BYTES: u64 = 22 * 1024 * 1024;
/// How large a video is meant to become at the most: then a proxy with its usual limits takes it, too. Its bit rate
/// follows from it, so a longer video is a coarser one.
const AIM_BYTES: u64 = 7 * 1024 * 1024;
/// The most bits a second that are spent, however short the video is.
const MAX_RATE: u64 = 8_000_000;
/// The bits a second of sound.
const AUDIO_RATE: u64 = 64_000;
/// How long a device may take to give its first picture.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How much longer than itself a video may take to be made.
const RECORD_GRACE: Duration = Duration::from_secs(30);
/// Sound that cannot be had fails within this time; then there is a video without it.
const AUDIO_START: Duration = Duration::from_secs(5);
/// Cameras adjust to the light while they take the first pictures.
const SKIPPED_FRAMES: u32 = 5;
/// The most bytes of a single picture.
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;

/// Where it is.
pub fn find() -> Option<PathBuf> {
    program::find("ffmpeg")
}

/// Something that ffmpeg can read. None of it ever comes from a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The input format, such as `v4l2`.
    pub format: String,
    /// Names and values of the format's options, without dashes.
    pub options: Vec<(String, String)>,
    /// The device.
    pub input: String,
}

impl Source {
    /// A source without options.
    pub fn new(format: impl Into<String>, input: impl Into<String>) -> Self {
        Source { format: format.into(), options: Vec::new(), input: input.into() }
    }

    /// The source with one option more.
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.options.push((name.to_owned(), value.to_string()));
        self
    }

    fn apply(&self, command: &mut Command) {
        command.args(["-f", &self.format]);
        for (name, value) in &self.options {
            command.arg(format!("-{name}")).arg(value);
        }
        command.args(["-i", &self.input]);
    }
}

/// What a sound server's source of this name gives, if there is a server. PipeWire answers in PulseAudio's place.
#[cfg(all(unix, not(target_os = "macos")))]
pub fn sound_server(name: &str) -> Option<Source> {
    let socket = std::env::var_os("XDG_RUNTIME_DIR").map(|folder| Path::new(&folder).join("pulse/native"));
    let is_there = std::env::var_os("PULSE_SERVER").is_some() || socket.is_some_and(|socket| socket.exists());
    is_there.then(|| Source::new("pulse", name))
}

/// What ffmpeg prints about the cameras and microphones of Windows.
///
/// # Errors
/// [`Failure`] if it prints nothing.
#[cfg(windows)]
pub async fn directshow_devices(ffmpeg: &Path, cancel: &CancellationToken) -> Result<String, Failure> {
    let mut command = Command::new(ffmpeg);
    command.args(["-nostdin", "-hide_banner", "-f", "dshow", "-list_devices", "true", "-i", "dummy"]);
    let ended = program::run(command, b"", Bounds { time: START_TIMEOUT, output: 64 * 1024 }, cancel).await;
    match ended.exit {
        // It always ends with an error, since there is no device of that name.
        Exit::Code(_) => Ok(String::from_utf8_lossy(&ended.stderr.bytes).into_owned()),
        Exit::Cancelled => Err(Failure::Cancelled),
        Exit::TimedOut | Exit::NotStarted(_) => Err(Failure::other("ffmpeg did not tell of any device")),
    }
}

/// Takes one picture.
///
/// # Errors
/// [`Failure`] if there is none.
pub async fn frame(ffmpeg: &Path, source: &Source, cancel: &CancellationToken) -> Result<RgbImage, Failure> {
    let mut command = command(ffmpeg);
    source.apply(&mut command);
    command.args(["-map", "0:v:0", "-vf", &format!("select=gte(n\\,{SKIPPED_FRAMES})"), "-frames:v", "1"]);
    command.args(["-f", "image2pipe", "-c:v", "png", "-pix_fmt", "rgb24", "-compression_level", "1", "pipe:1"]);
    let ended = run(command, START_TIMEOUT, cancel).await?;
    picture::decode_png(ended.stdout.bytes).await
}

/// What is to be recorded.
#[derive(Debug, Clone)]
pub struct Recording {
    /// How much of it.
    pub duration: Duration,
    /// What is to be seen.
    pub video: Source,
    /// How many pictures a second; without it, as many as there are.
    pub fps: Option<f64>,
    /// What is to be heard. If it cannot be had, the video is silent.
    pub audio: Option<Source>,
}

/// A video that can be handed over.
#[derive(Debug)]
pub struct Video {
    /// The bytes of the MP4.
    pub base64: String,
    /// Whether it has sound.
    pub has_audio: bool,
}

/// Makes a video.
///
/// # Errors
/// [`Failure`] if there is none.
pub async fn record(ffmpeg: &Path, mut recording: Recording, cancel: &CancellationToken) -> Result<Video, Failure> {
    let scratch = Scratch::new().map_err(Failure::other)?;
    let since = Instant::now();
    let mut file = scratch.path().join("video.mp4");
    let mut recorded = record_to(ffmpeg, &recording, &file, cancel).await;
    let is_mute = matches!(recorded, Err(Failure::Other(_))) && since.elapsed() < AUDIO_START;
    if is_mute && recording.audio.take().is_some() {
        tracing::debug!("there is no sound to be had");
        file = scratch.path().join("silent.mp4");
        recorded = record_to(ffmpeg, &recording, &file, cancel).await;
    }
    recorded?;
    let has_audio = recording.audio.is_some();
    let read = tokio::task::spawn_blocking(move || {
        // The folder is gone when the video is there.
        let _scratch = scratch;
        read(&file)
    });
    Ok(Video { base64: read.await.map_err(Failure::other)??, has_audio })
}

fn read(file: &Path) -> Result<String, Failure> {
    match file.metadata().map_err(Failure::other)?.len() {
        0 => Err(Failure::other("the video is empty")),
        1..=MAX_VIDEO_BYTES => Ok(BASE64_STANDARD.encode(std::fs::read(file).map_err(Failure::other)?)),
        _ => Err(Failure::TooLarge),
    }
}

async fn record_to(
    ffmpeg: &Path,
    recording: &Recording,
    file: &Path,
    cancel: &CancellationToken,
) -> Result<(), Failure> {
    let mut command = command(ffmpeg);
    recording.video.apply(&mut command);
    if let Some(audio) = &recording.audio {
        audio.apply(&mut command);
        command.args(["-map", "1:a:0", "-c:a", "aac", "-b:a", &AUDIO_RATE.to_string()]);
    }
    let rate = video_rate(recording.duration).to_string();
    command.args(["-map", "0:v:0", "-t", &format!("{:.3}", recording.duration.as_secs_f64())]);
    // Most players want each colour for two by two pixels, so there must be an even number of them.
    let even = "crop=trunc(iw/2)*2:trunc(ih/2)*2";
    let filter = recording.fps.map_or_else(|| even.to_owned(), |fps| format!("{even},fps={fps}"));
    command.args(["-vf", &filter, "-pix_fmt", "yuv420p"]);
    command.args(["-c:v", "libx264", "-preset", "veryfast", "-crf", "25", "-maxrate", &rate, "-bufsize", &rate]);
    // It stops a little above the bound, so that what was cut off is found to be too large.
    let limit = (MAX_VIDEO_BYTES + 256 * 1024).to_string();
    command.args(["-movflags", "+faststart", "-fs", &limit, "-f", "mp4"]).arg(file);
    run(command, recording.duration + RECORD_GRACE, cancel).await.map(drop)
}

/// The most bits a second of a video's pictures.
fn video_rate(duration: Duration) -> u64 {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1);
    // The container takes some, and the encoder keeps to its rate only roughly.
    (AIM_BYTES * 8 * 1000 / millis * 9 / 10).saturating_sub(AUDIO_RATE).clamp(AUDIO_RATE, MAX_RATE)
}

fn command(ffmpeg: &Path) -> Command {
    let mut command = Command::new(ffmpeg);
    command.args(["-nostdin", "-hide_banner", "-loglevel", "error"]);
    command
}

async fn run(command: Command, time: Duration, cancel: &CancellationToken) -> Result<Ended, Failure> {
    let ended = program::run(command, b"", Bounds { time, output: MAX_FRAME_BYTES }, cancel).await;
    match &ended.exit {
        Exit::Code(Some(0)) if ended.stdout.is_truncated => Err(Failure::other("the picture is too large")),
        Exit::Code(Some(0)) => Ok(ended),
        Exit::Code(_) => {
            let complaint = &ended.stderr.bytes[..ended.stderr.bytes.len().min(1024)];
            Err(Failure::other(String::from_utf8_lossy(complaint)))
        }
        Exit::Cancelled => Err(Failure::Cancelled),
        Exit::TimedOut => Err(Failure::other("ffmpeg took too long")),
        Exit::NotStarted(error) => Err(Failure::other(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_follows_from_the_duration() {
        let rate = |seconds| video_rate(Duration::from_secs(seconds));
        assert_eq!([rate(0), rate(1), rate(6)], [MAX_RATE; 3]);
        assert!(rate(60) > 800_000 && rate(300) > 100_000);
        for seconds in [10, 60, 300] {
            assert!((rate(seconds) + AUDIO_RATE) * seconds / 8 < AIM_BYTES);
        }
    }

    #[test]
    fn what_is_too_large_or_empty_is_not_handed_over() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        assert!(matches!(read(&path), Err(Failure::Other(_))));
        file.set_len(MAX_VIDEO_BYTES).unwrap();
        assert!(read(&path).unwrap().len() < 30 * 1024 * 1024);
        file.set_len(MAX_VIDEO_BYTES + 1).unwrap();
        assert!(matches!(read(&path), Err(Failure::TooLarge)));
    }
}
