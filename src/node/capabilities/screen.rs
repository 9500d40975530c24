//! `screen.*`: what this node's displays show, as a picture or as a video.
//!
//! A node on a server has no display, and then neither command is listed. There is no prompt before a recording: who
//! may record is decided where tools are lent.

#[cfg(all(unix, not(target_os = "macos")))]
mod linux;
#[cfg(not(target_os = "macos"))]
mod look;
#[cfg(target_os = "macos")]
mod macos;
#[cfg(windows)]
mod windows;
#[cfg(all(unix, not(target_os = "macos")))]
mod x11;

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

#[cfg(all(unix, not(target_os = "macos")))]
use self::linux::{Desktop, sound};
#[cfg(target_os = "macos")]
use self::macos::{Desktop, sound};
#[cfg(windows)]
use self::windows::{Desktop, sound};
use super::media::ffmpeg::{self, Recording};
use super::media::picture::{Format, Wish, encode};
use super::media::{is_mp4, number};
use super::{Args, Capability, Image, Request, Response};

/// The commands, in the order in which they are listed.
pub const COMMANDS: [&str; 2] = ["screen.snapshot", "screen.record"];
/// The largest number of a display.
const MAX_INDEX: u32 = 32;

/// What a node may be told about its screen.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The X display, such as `:1`; without it, whatever the environment names when a command is called.
    pub display: Option<String>,
}

/// The capability.
#[derive(Debug, Default)]
pub struct Screen {
    options: Options,
}

impl Screen {
    /// The screen that the options tell of.
    pub fn new(options: Options) -> Self {
        Screen { options }
    }

    fn desktop(&self) -> Option<Desktop> {
        Desktop::find(self.options.display.as_deref())
    }
}

impl Capability for Screen {
    fn category(&self) -> &str {
        "screen"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, command: &str) -> bool {
        match command {
            "screen.record" => {
                self.desktop().is_some_and(|desktop| desktop.is_recordable()) && ffmpeg::find().is_some()
            }
            _ => self.desktop().is_some(),
        }
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let index = json!({
            "type": "integer", "minimum": 0, "maximum": MAX_INDEX, "default": 0,
            "description": "Which display; 0 is the primary one, and so is one that is not there",
        });
        let properties = match command {
            "screen.snapshot" => json!({
                "format": { "type": "string", "enum": ["png", "jpeg"], "default": "png" },
                "maxWidth": {
                    "type": "integer", "minimum": 16, "maximum": 7680, "default": 1920,
                    "description": "A wider picture is made smaller",
                },
                "quality": {
                    "type": "integer", "minimum": 1, "maximum": 100, "default": 80, "description": "Of a jpeg",
                },
                "screenIndex": index,
                "monitor": { "type": "integer", "description": "Another name of screenIndex" },
                "includePointer": { "type": "boolean", "default": true, "description": "Show the mouse pointer" },
            }),
            "screen.record" => json!({
                "durationMs": { "type": "integer", "minimum": 100, "maximum": 300_000, "default": 10_000 },
                "format": { "type": "string", "enum": ["mp4"], "default": "mp4" },
                "fps": { "type": "number", "minimum": 1, "maximum": 60, "default": 10 },
                "screenIndex": index,
                "includeAudio": {
                    "type": "boolean", "default": false,
                    "description": "With what the speakers play, if that can be had",
                },
            }),
            _ => return None,
        };
        Some(json!({ "type": "object", "properties": properties, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "screen.snapshot" => self.snapshot(&request.args, &cancel).await,
                "screen.record" => self.record(&request.args, &cancel).await,
                other => Response::unknown_command(other),
            }
        })
    }
}

impl Screen {
    async fn snapshot(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let Some(format) = Format::parse(args.string("format").unwrap_or("png")) else {
            return Response::failed("Unsupported screen snapshot format: use png or jpeg");
        };
        let quality = u8::try_from(number(args, "quality", 80, 1, 100)).expect("it is 100 at the most");
        let wish = Wish { format, max_width: number(args, "maxWidth", 1920, 16, 7680), quality };
        let monitor = number(args, "monitor", 0, 0, MAX_INDEX);
        let index = number(args, "screenIndex", monitor, 0, MAX_INDEX);
        let with_pointer = args.bool("includePointer").unwrap_or(true);
        let Some(desktop) = self.desktop() else { return Response::failed("Screen capture not available") };
        let encoded = async { encode(desktop.capture(index, with_pointer, cancel).await?, wish, cancel).await };
        match encoded.await {
            Ok(picture) => {
                let payload = json!({
                    "format": format.name(),
                    "width": picture.width,
                    "height": picture.height,
                    "base64": picture.base64,
                    "image": picture.data_url(),
                });
                Response::Done { payload, images: vec![picture.into_image()] }
            }
            Err(failure) => failure.response("Capture failed"),
        }
    }

    async fn record(&self, args: &Args, cancel: &CancellationToken) -> Response {
        if !is_mp4(args.string("format")) {
            return Response::failed("Unsupported screen recording format: use mp4");
        }
        let duration_ms = number(args, "durationMs", 10_000, 100, 300_000);
        let fps = args.double("fps").unwrap_or(10.0).clamp(1.0, 60.0);
        let index = number(args, "screenIndex", 0, 0, MAX_INDEX);
        let with_audio = args.bool("includeAudio").unwrap_or(false);
        let desktop = self.desktop().filter(Desktop::is_recordable);
        let Some((desktop, ffmpeg)) = desktop.zip(ffmpeg::find()) else {
            return Response::failed("Screen recording not available");
        };
        let recorded = async {
            let video = desktop.source(index, fps, cancel).await?;
            let audio = with_audio.then(sound).flatten();
            let duration = Duration::from_millis(duration_ms.into());
            let recording = Recording { duration, video, fps: Some(fps), audio };
            ffmpeg::record(&ffmpeg, recording, cancel).await
        };
        match recorded.await {
            Ok(video) => {
                let payload = json!({
                    "format": "mp4",
                    "base64": &video.base64,
                    "durationMs": duration_ms,
                    "fps": plain(fps),
                    "screenIndex": index,
                    "hasAudio": video.has_audio,
                });
                let video = Image { mime_type: "video/mp4".to_owned(), base64: video.base64 };
                Response::Done { payload, images: vec![video] }
            }
            Err(failure) => failure.response("Recording failed"),
        }
    }
}

/// A number as people write it: a whole one without a point.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is from 1 to 60")]
fn plain(number: f64) -> Value {
    if number.fract() == 0.0 { (number as u64).into() } else { number.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(command: &str, args: Value) -> Response {
        let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
        // There is no such display.
        let screen = Screen::new(Options { display: Some(String::new()) });
        screen.execute(request, CancellationToken::new()).await
    }

    #[tokio::test]
    async fn formats_are_checked_before_anything_is_looked_at() {
        let snapshot = Response::failed("Unsupported screen snapshot format: use png or jpeg");
        assert_eq!(run("screen.snapshot", json!({ "format": "svg" })).await, snapshot);
        let record = Response::failed("Unsupported screen recording format: use mp4");
        assert_eq!(run("screen.record", json!({ "format": "webm" })).await, record);
        assert_eq!(run("screen.other", json!({})).await, Response::unknown_command("screen.other"));
    }

    #[test]
    fn whole_numbers_have_no_point() {
        assert_eq!([plain(10.0), plain(29.97)].map(|fps| fps.to_string()), ["10", "29.97"]);
    }
}
