//! `stt.*`: listening to the microphone and understanding what is said, all of it on this machine.
//!
//! A program records, another one recognizes. What was said is in the answer and nowhere else: not in errors, not in
//! logs, and in no file that lasts.

mod engine;
mod language;
mod microphone;
mod vad;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::scratch::Scratch;
use super::{Args, Capability, Request, Response, wav};
use engine::{Engine, Heard};
use language::Language;
use vad::Vad;

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 3] = ["stt.transcribe", "stt.listen", "stt.status"];
/// The samples of a second; recognizers want this many.
const SAMPLE_RATE: usize = 16_000;
/// The samples of a millisecond.
const PER_MS: usize = SAMPLE_RATE / 1000;
/// The longest recording of a fixed length.
const MAX_TRANSCRIBE_MS: i32 = 30_000;
/// How long is listened, if the caller does not say.
const DEFAULT_LISTEN_MS: i32 = 30_000;
/// The bounds of how long is listened.
const LISTEN_MS: std::ops::RangeInclusive<i32> = 1_000..=120_000;
/// The sound before and after speech that recognizers get, in milliseconds: words begin and end softly.
const MARGIN_MS: usize = 300;

/// What the node's owner has decided.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// whisper.cpp's program, if it is not on PATH as `whisper-cli` or `whisper-cpp`.
    pub whisper: Option<PathBuf>,
    /// Its model: a file such as `ggml-base.bin`.
    pub whisper_model: Option<PathBuf>,
    /// PocketSphinx's model, a folder, if it is not where Debian has it. It is used where whisper.cpp is not ready.
    pub pocketsphinx_model: Option<PathBuf>,
    /// The microphone, as the recorder names it, if it is not the default one.
    pub microphone: Option<String>,
    /// The PulseAudio server, if it is not the user's own.
    pub pulse_server: Option<String>,
}

/// The capability.
#[derive(Debug)]
pub struct Stt {
    options: Options,
    microphone: Semaphore,
}

impl Default for Stt {
    fn default() -> Self {
        Stt::new(Options::default())
    }
}

/// How a command listens, and what it calls that.
struct Listening {
    /// The command's name in its errors.
    name: &'static str,
    time: Duration,
    /// Whether it is over when nobody speaks any more.
    ends_with_speech: bool,
}

/// What came of it.
struct Understood {
    heard: Heard,
    duration_ms: usize,
}

impl Stt {
    /// A capability with these options.
    pub fn new(options: Options) -> Self {
        Stt { options, microphone: Semaphore::new(1) }
    }

    async fn transcribe(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let Some(time) = args.int("maxDurationMs").filter(|time| *time > 0) else {
            return Response::failed("Missing required maxDurationMs");
        };
        if time > MAX_TRANSCRIBE_MS {
            return Response::failed(format!("maxDurationMs exceeds {MAX_TRANSCRIBE_MS} ms"));
        }
        let listening = Listening { name: "transcribe", time: milliseconds(time), ends_with_speech: false };
        let payload = |engine: &Engine, language: String, understood: Understood| {
            let text = understood.heard.text();
            json!({
                "transcribed": !text.is_empty(),
                "text": text,
                "durationMs": understood.duration_ms,
                "language": language,
                "engineEffective": engine.name(),
            })
        };
        self.understand(listening, args, cancel, payload).await
    }

    async fn listen(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let time = args.int("timeoutMs").unwrap_or(DEFAULT_LISTEN_MS).clamp(*LISTEN_MS.start(), *LISTEN_MS.end());
        let listening = Listening { name: "listen", time: milliseconds(time), ends_with_speech: true };
        let payload = |engine: &Engine, language: String, understood: Understood| {
            let segments = understood.heard.pieces.iter();
            let segments =
                segments.map(|piece| json!({ "text": piece.text, "startMs": piece.start, "endMs": piece.end }));
            json!({
                "text": understood.heard.text(),
                "language": language,
                "durationMs": understood.duration_ms,
                "segments": segments.collect::<Vec<_>>(),
                "engineEffective": engine.name(),
            })
        };
        self.understand(listening, args, cancel, payload).await
    }

    async fn understand(
        &self,
        listening: Listening,
        args: &Args,
        cancel: &CancellationToken,
        payload: impl FnOnce(&Engine, String, Understood) -> Value,
    ) -> Response {
        let Some(language) = Language::parse(args.string("language")) else {
            return Response::failed("Invalid language tag");
        };
        let name = listening.name;
        let Ok(engine) = engine::choose(&self.options) else {
            return Response::failed(format!("STT {name} not available"));
        };
        if !engine.knows(&language) {
            return Response::failed(format!("Language not supported by {}", engine.name()));
        }
        // Whoever had to wait would record something else than what was said when it was called.
        let Ok(_microphone) = self.microphone.try_acquire() else {
            return Response::failed("The microphone is in use");
        };
        let title = format!("{}{}", name[..1].to_ascii_uppercase(), &name[1..]);
        match cancel.run_until_cancelled(self.hear(&engine, &language, &listening)).await {
            None => Response::failed(format!("{title} canceled")),
            Some(Ok(understood)) => {
                let found = understood.heard.language.clone().filter(|_| language.is_auto());
                let language = found.unwrap_or_else(|| language.tag().to_owned());
                Response::done(payload(&engine, language, understood))
            }
            Some(Err(error)) => {
                tracing::warn!(engine = engine.name(), error, "speech was not recognized");
                Response::failed(format!("{title} failed"))
            }
        }
    }

    async fn hear(&self, engine: &Engine, language: &Language, listening: &Listening) -> Result<Understood, String> {
        let mut vad = Vad::default();
        let samples = microphone::record(&self.options, listening.time, |new| {
            vad.push(new);
            listening.ends_with_speech && vad.is_over()
        });
        let samples = samples.await?;
        let duration_ms = samples.len() / PER_MS;
        // Where nobody speaks, recognizers invent something.
        let Some(speech) = vad.speech() else { return Ok(Understood { heard: Heard::default(), duration_ms }) };
        let span = with_margin(&speech, duration_ms);
        let (start, length) = (span.start, span.len());
        let write = move || {
            let scratch = Scratch::new()?;
            let sound = scratch.path().join("speech.wav");
            std::fs::write(&sound, wav::mono(SAMPLE_RATE, &samples[span.start * PER_MS..span.end * PER_MS]))?;
            Ok((scratch, sound))
        };
        let written = tokio::task::spawn_blocking(write).await.map_err(|error| error.to_string())?;
        let (_scratch, sound) = written.map_err(|error: std::io::Error| error.to_string())?;
        let mut heard = engine.recognize(&sound, length, language).await?;
        for piece in &mut heard.pieces {
            // Recognizers round up beyond the end.
            piece.start = (piece.start + start).min(duration_ms);
            piece.end = (piece.end + start).min(duration_ms);
        }
        Ok(Understood { heard, duration_ms })
    }

    fn status(&self) -> Value {
        let (engine, readiness) = match engine::choose(&self.options) {
            Ok(engine) => (engine.name(), "ready"),
            Err(unready) => unready,
        };
        let is_ready = readiness == "ready";
        json!({
            "engine": engine,
            "readiness": readiness,
            "modelDownloadProgress": null,
            "isListenWithVadSupported": is_ready,
            "isBoundedTranscribeSupported": is_ready,
        })
    }
}

impl Heard {
    fn text(&self) -> String {
        self.pieces.iter().map(|piece| &*piece.text).collect::<Vec<_>>().join(" ")
    }
}

fn with_margin(speech: &Range<usize>, end: usize) -> Range<usize> {
    speech.start.saturating_sub(MARGIN_MS)..(speech.end + MARGIN_MS).min(end)
}

fn milliseconds(count: i32) -> Duration {
    Duration::from_millis(count.unsigned_abs().into())
}

impl Capability for Stt {
    fn category(&self) -> &str {
        "stt"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, command: &str) -> bool {
        command == "stt.status" || engine::choose(&self.options).is_ok()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let language = json!({
            "type": "string",
            "default": "auto",
            "description": "A language tag such as en or de-CH, or auto",
        });
        let (properties, required) = match command {
            "stt.transcribe" => (
                json!({
                    "maxDurationMs": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MAX_TRANSCRIBE_MS,
                        "description": "How long to record",
                    },
                    "language": language,
                }),
                vec!["maxDurationMs"],
            ),
            "stt.listen" => (
                json!({
                    "timeoutMs": {
                        "type": "integer",
                        "minimum": LISTEN_MS.start(),
                        "maximum": LISTEN_MS.end(),
                        "default": DEFAULT_LISTEN_MS,
                        "description": "When to stop even if nobody has spoken",
                    },
                    "language": language,
                }),
                vec![],
            ),
            "stt.status" => (json!({}), vec![]),
            _ => return None,
        };
        Some(json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "stt.transcribe" => self.transcribe(&request.args, &cancel).await,
                "stt.listen" => self.listen(&request.args, &cancel).await,
                "stt.status" => Response::done(self.status()),
                other => Response::unknown_command(other),
            }
        })
    }
}
