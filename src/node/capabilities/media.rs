//! Pictures and videos: what the screen and the cameras have in common.

pub mod ffmpeg;
pub mod picture;
pub mod scratch;

use super::{Args, Response};

/// Why there is no picture or video.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nobody wants it any more.
    #[error("cancelled")]
    Cancelled,
    /// It is too large to be handed over.
    #[error("it is larger than {} MiB", ffmpeg::MAX_VIDEO_BYTES >> 20)]
    TooLarge,
    /// The caller named a camera that is not there.
    #[error("{0}")]
    NoDevice(&'static str),
    /// Anything else. The reason is for the log alone.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    /// Something went wrong that the caller is not told of.
    pub fn other(error: impl ToString) -> Self {
        Failure::Other(error.to_string())
    }

    /// The response of a command that failed; `what` says that it did.
    pub fn response(self, what: &str) -> Response {
        match self {
            Failure::Cancelled => Response::failed("cancelled"),
            Failure::TooLarge => Response::failed(format!("{what}: {self}; record less at a time")),
            Failure::NoDevice(_) => Response::failed(format!("{what}: {self}")),
            Failure::Other(reason) => {
                tracing::debug!(%reason, "{what}");
                Response::failed(what)
            }
        }
    }
}

/// A whole number between two bounds. What is beyond a bound counts as that bound.
pub fn number(args: &Args, name: &str, default: u32, low: u32, high: u32) -> u32 {
    args.int(name).map_or(default, |number| u32::try_from(number).unwrap_or(0)).clamp(low, high)
}

/// Whether a video may have this format; there is only one.
pub fn is_mp4(format: Option<&str>) -> bool {
    format.is_none_or(|format| format.trim().eq_ignore_ascii_case("mp4"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_are_forced_between_their_bounds() {
        let args = Args::new(json!({ "low": -3, "zero": 0, "high": 99_999, "in": 17, "float": 20.0, "text": "20" }));
        let numbers = ["low", "zero", "high", "in", "float", "text", "none"];
        assert_eq!(numbers.map(|name| number(&args, name, 80, 16, 7680)), [16, 16, 7680, 17, 80, 80, 80]);
    }

    #[test]
    fn failures_say_what_the_caller_can_do_and_nothing_else() {
        let text = |failure: Failure| match failure.response("Clip failed") {
            Response::Failed(text) => text,
            Response::Done { .. } => panic!(),
        };
        assert_eq!(text(Failure::Cancelled), "cancelled");
        assert_eq!(text(Failure::TooLarge), "Clip failed: it is larger than 22 MiB; record less at a time");
        assert_eq!(text(Failure::NoDevice("this node has no camera")), "Clip failed: this node has no camera");
        assert_eq!(text(Failure::other("a secret")), "Clip failed");
    }
}
