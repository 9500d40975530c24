//! `camera.*`: this node's cameras, and a photo or a clip from one of them.
//!
//! ffmpeg reads the camera. Which one is chosen from the list of those that are there: what a caller names is only
//! ever compared with it. There is no prompt before a photo: who may take one is decided where tools are lent.

pub mod devices;

use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use self::devices::Device;
use super::media::ffmpeg::{self, Recording};
use super::media::picture::{Format, Wish, encode};
use super::media::{Failure, is_mp4, number};
use super::{Args, Capability, Image, Request, Response};

/// The commands, in the order in which they are listed.
pub const COMMANDS: [&str; 3] = ["camera.list", "camera.snap", "camera.clip"];

/// What a node may be told about its cameras.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The cameras, such as one in the network; without it, those that the system knows.
    pub devices: Option<Vec<Device>>,
}

/// The capability.
#[derive(Debug, Default)]
pub struct Camera {
    options: Options,
}

impl Camera {
    /// The cameras that the options tell of.
    pub fn new(options: Options) -> Self {
        Camera { options }
    }
}

impl Capability for Camera {
    fn category(&self) -> &str {
        "camera"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, command: &str) -> bool {
        match command {
            "camera.list" => self.options.devices.is_some() || devices::are_known(),
            _ => ffmpeg::find().is_some() && self.is_available("camera.list"),
        }
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let device = json!({
            "type": "string", "description": "A deviceId of camera.list; without it, the default camera",
        });
        let properties = match command {
            "camera.list" => json!({}),
            "camera.snap" => json!({
                "deviceId": device,
                "format": { "type": "string", "enum": ["jpeg", "png"], "default": "jpeg" },
                "maxWidth": {
                    "type": "integer", "minimum": 16, "maximum": 4096, "default": 1280,
                    "description": "A wider photo is made smaller",
                },
                "quality": {
                    "type": "integer", "minimum": 1, "maximum": 100, "default": 80, "description": "Of a jpeg",
                },
            }),
            "camera.clip" => json!({
                "deviceId": device,
                "durationMs": { "type": "integer", "minimum": 100, "maximum": 60_000, "default": 3000 },
                "format": { "type": "string", "enum": ["mp4"], "default": "mp4" },
                "includeAudio": {
                    "type": "boolean", "default": true,
                    "description": "With what the microphone hears, if there is one",
                },
            }),
            _ => return None,
        };
        Some(json!({ "type": "object", "properties": properties, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "camera.list" => self.list(&cancel).await,
                "camera.snap" => self.snap(&request.args, &cancel).await,
                "camera.clip" => self.clip(&request.args, &cancel).await,
                other => Response::unknown_command(other),
            }
        })
    }
}

impl Camera {
    async fn list(&self, cancel: &CancellationToken) -> Response {
        if !self.is_available("camera.list") {
            return Response::failed("Camera list not available");
        }
        match self.devices(cancel).await {
            Ok(devices) => {
                let cameras = devices.iter().enumerate().map(
                    |(place, device)| json!({ "deviceId": device.id, "name": device.name, "isDefault": place == 0 }),
                );
                Response::done(json!({ "cameras": cameras.collect::<Vec<_>>() }))
            }
            Err(failure) => failure.response("List failed"),
        }
    }

    async fn snap(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let Some(format) = Format::parse(args.string("format").unwrap_or("jpeg")) else {
            return Response::failed("Unsupported camera snap format: use jpeg or png");
        };
        let quality = u8::try_from(number(args, "quality", 80, 1, 100)).expect("it is 100 at the most");
        let wish = Wish { format, max_width: number(args, "maxWidth", 1280, 16, 4096), quality };
        let Some(ffmpeg) = ffmpeg::find().filter(|_| self.is_available("camera.snap")) else {
            return Response::failed("Camera snap not available");
        };
        let snapped = async {
            let device = self.choose(args, cancel).await?;
            let photo = ffmpeg::frame(&ffmpeg, &device.still(wish.max_width), cancel).await?;
            encode(photo, wish, cancel).await
        };
        match snapped.await {
            Ok(picture) => {
                let payload = json!({
                    "format": format.name(),
                    "width": picture.width,
                    "height": picture.height,
                    "base64": picture.base64,
                });
                Response::Done { payload, images: vec![picture.into_image()] }
            }
            Err(failure) => failure.response("Snap failed"),
        }
    }

    async fn clip(&self, args: &Args, cancel: &CancellationToken) -> Response {
        if !is_mp4(args.string("format")) {
            return Response::failed("Unsupported camera clip format: use mp4");
        }
        let duration_ms = number(args, "durationMs", 3000, 100, 60_000);
        let with_audio = args.bool("includeAudio").unwrap_or(true);
        let Some(ffmpeg) = ffmpeg::find().filter(|_| self.is_available("camera.clip")) else {
            return Response::failed("Camera clip not available");
        };
        let clipped = async {
            let Device { video, audio, .. } = self.choose(args, cancel).await?;
            let (duration, audio) = (Duration::from_millis(duration_ms.into()), audio.filter(|_| with_audio));
            ffmpeg::record(&ffmpeg, Recording { duration, video, fps: None, audio }, cancel).await
        };
        match clipped.await {
            Ok(video) => {
                let payload = json!({
                    "format": "mp4",
                    "base64": &video.base64,
                    "durationMs": duration_ms,
                    "hasAudio": video.has_audio,
                });
                let video = Image { mime_type: "video/mp4".to_owned(), base64: video.base64 };
                Response::Done { payload, images: vec![video] }
            }
            Err(failure) => failure.response("Clip failed"),
        }
    }

    /// Every camera; the first one is the default.
    async fn devices(&self, cancel: &CancellationToken) -> Result<Vec<Device>, Failure> {
        match &self.options.devices {
            Some(devices) => Ok(devices.clone()),
            None => devices::known(cancel).await,
        }
    }

    /// The camera that the caller names, else the default one.
    async fn choose(&self, args: &Args, cancel: &CancellationToken) -> Result<Device, Failure> {
        let mut devices = self.devices(cancel).await?.into_iter();
        match args.string("deviceId").filter(|id| !id.is_empty()) {
            Some(id) => devices.find(|device| device.id == id).ok_or(Failure::NoDevice("there is no such camera")),
            None => devices.next().ok_or(Failure::NoDevice("this node has no camera")),
        }
    }
}
