//! `location.get`: where this device is.
//!
//! The desktop's own service finds that out, and asks whom it must: GeoClue on Linux, the location service on Windows.

#[cfg(all(unix, not(target_os = "macos")))]
mod geoclue;
#[cfg(windows)]
mod windows;

use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{Args, Capability, Request, Response};

#[cfg(all(unix, not(target_os = "macos")))]
use geoclue::{is_there, locate};
#[cfg(windows)]
use windows::{is_there, locate};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 1] = ["location.get"];
/// How old a position may be, if the caller does not say.
const DEFAULT_MAX_AGE_MS: i32 = 30_000;
/// How long finding one may take, if the caller does not say.
const DEFAULT_TIMEOUT_MS: i32 = 10_000;
/// The bounds of how long finding one may take.
const TIMEOUTS_MS: std::ops::RangeInclusive<i32> = 100..=120_000;

/// What the node's owner has decided.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The address of the D-Bus bus with GeoClue, if it is not the machine's own.
    pub system_bus: Option<String>,
}

/// The capability.
#[derive(Debug, Default)]
pub struct Location {
    options: Options,
    last: Mutex<Option<Position>>,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
struct Wish {
    is_precise: bool,
    /// The position may not be older.
    not_before: SystemTime,
    timeout: Duration,
}

/// A position.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Position {
    latitude: f64,
    longitude: f64,
    /// In metres.
    accuracy: f64,
    time: SystemTime,
    is_precise: bool,
}

/// Why there is no position.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NotFound {
    /// There is no service that finds positions.
    Unavailable(String),
    /// The service may not tell.
    Refused,
    /// The service did not find it.
    Failed(String),
}

impl Location {
    /// A capability with these options.
    pub fn new(options: Options) -> Self {
        Location { options, last: Mutex::default() }
    }

    async fn get(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let wish = Wish::new(args, SystemTime::now());
        let last = *self.last.lock().expect(UNPOISONED);
        if let Some(known) = last.filter(|known| wish.is_met_by(known)) {
            return Response::done(known.payload());
        }
        let found = tokio::time::timeout(wish.timeout, locate(&self.options, &wish));
        let found = match cancel.run_until_cancelled(found).await {
            None => return Response::failed("cancelled"),
            Some(found) => found.unwrap_or_else(|_| Err(NotFound::Failed("it took too long".to_owned()))),
        };
        match found {
            Ok(position) => {
                *self.last.lock().expect(UNPOISONED) = Some(position);
                Response::done(position.payload())
            }
            Err(NotFound::Refused) => Response::failed("LOCATION_PERMISSION_REQUIRED"),
            Err(NotFound::Unavailable(error)) => {
                tracing::debug!(error, "there is no location service");
                Response::failed(UNAVAILABLE)
            }
            Err(NotFound::Failed(error)) => {
                tracing::debug!(error, "the position was not found");
                Response::failed("Location failed")
            }
        }
    }
}

/// What a caller reads where no service finds positions.
const UNAVAILABLE: &str = "Location not available";
/// Nothing panics while the last position is locked.
const UNPOISONED: &str = "the last position is only copied under its lock";

impl Wish {
    fn new(args: &Args, now: SystemTime) -> Self {
        let accuracy = args.string("accuracy").unwrap_or_default().trim().to_ascii_lowercase();
        let max_age = args.int("maxAge").unwrap_or(DEFAULT_MAX_AGE_MS).max(0);
        let timeout = args.int("locationTimeout").unwrap_or(DEFAULT_TIMEOUT_MS);
        let timeout = timeout.clamp(*TIMEOUTS_MS.start(), *TIMEOUTS_MS.end());
        Wish {
            is_precise: ["precise", "high"].contains(&&*accuracy),
            not_before: now - milliseconds(max_age),
            timeout: milliseconds(timeout),
        }
    }

    fn is_met_by(&self, position: &Position) -> bool {
        position.time >= self.not_before && (position.is_precise || !self.is_precise)
    }
}

fn milliseconds(count: i32) -> Duration {
    Duration::from_millis(count.max(0).unsigned_abs().into())
}

impl Position {
    fn payload(&self) -> Value {
        let since = self.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        json!({
            "latitude": self.latitude,
            "longitude": self.longitude,
            "accuracy": self.accuracy,
            "timestamp": u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

impl Capability for Location {
    fn category(&self) -> &str {
        "location"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, _: &str) -> bool {
        is_there(&self.options)
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        (command == COMMANDS[0]).then(|| {
            json!({
                "type": "object",
                "properties": {
                    "accuracy": {
                        "type": "string",
                        "enum": ["default", "precise"],
                        "default": "default",
                        "description": "About the street, or as exact as the device can",
                    },
                    "maxAge": {
                        "type": "integer",
                        "minimum": 0,
                        "default": DEFAULT_MAX_AGE_MS,
                        "description": "How old a position that is already known may be, in milliseconds",
                    },
                    "locationTimeout": {
                        "type": "integer",
                        "minimum": TIMEOUTS_MS.start(),
                        "maximum": TIMEOUTS_MS.end(),
                        "default": DEFAULT_TIMEOUT_MS,
                        "description": "How long finding it may take, in milliseconds",
                    },
                },
                "additionalProperties": true,
            })
        })
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "location.get" => self.get(&request.args, &cancel).await,
                other => Response::unknown_command(other),
            }
        })
    }
}

#[cfg(target_os = "macos")]
fn is_there(_: &Options) -> bool {
    false
}

#[cfg(target_os = "macos")]
async fn locate(_: &Options, _: &Wish) -> Result<Position, NotFound> {
    Err(NotFound::Unavailable("only apps of a bundle may ask macOS for it".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_has_defaults_and_bounds() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        let read = |args| {
            let wish = Wish::new(&Args::new(args), now);
            let age = now.duration_since(wish.not_before).unwrap();
            (wish.is_precise, age.as_millis(), wish.timeout.as_millis())
        };
        assert_eq!(read(Value::Null), (false, 30_000, 10_000));
        assert_eq!(read(json!({ "accuracy": 1, "maxAge": "5", "locationTimeout": 1.5 })), (false, 30_000, 10_000));
        assert_eq!(read(json!({ "accuracy": " High", "maxAge": -1, "locationTimeout": 0 })), (true, 0, 100));
        assert_eq!(read(json!({ "accuracy": "precise", "maxAge": 5, "locationTimeout": 999_999 })), (true, 5, 120_000));
    }

    #[test]
    fn a_known_position_serves_if_it_is_young_and_exact_enough() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        let known = |age, is_precise| Position {
            latitude: 1.5,
            longitude: -2.0,
            accuracy: 30.0,
            time: now - Duration::from_secs(age),
            is_precise,
        };
        let serves = |args, position| Wish::new(&Args::new(args), now).is_met_by(&position);
        assert!(serves(Value::Null, known(30, false)) && !serves(Value::Null, known(31, true)));
        let precise = || json!({ "accuracy": "precise" });
        assert!(serves(precise(), known(1, true)) && !serves(precise(), known(1, false)));
        let payload = json!({ "latitude": 1.5, "longitude": -2.0, "accuracy": 30.0, "timestamp": 990_000 });
        assert_eq!(known(10, true).payload(), payload);
    }
}
