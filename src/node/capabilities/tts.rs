//! `tts.*`: speaking aloud.
//!
//! A program turns the text into a WAV file, a player plays it. One speech is heard at a time; the others wait for
//! their turn. Neither what is said nor what a program says about it is logged.

mod playback;
mod voice;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::scratch::Scratch;
use super::{Args, Capability, Request, Response, wav};
use voice::{Provider, Readiness, is_name};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 2] = ["tts.speak", "tts.status"];
/// The most characters of a text.
const MAX_TEXT: usize = 5000;
/// How long a speech may wait for its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(300);

/// What the node's owner has decided.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Who speaks, if the caller does not say; Piper by default.
    pub provider: Option<String>,
    /// Piper's program, if it is not on PATH.
    pub piper: Option<PathBuf>,
    /// Piper's voice: a file `….onnx` with its `….onnx.json` beside it. Voices in the same folder can be named by
    /// callers.
    pub piper_voice: Option<PathBuf>,
    /// The folder in which every speech is kept as a WAV file. Nothing in it is ever removed.
    pub output_dir: Option<PathBuf>,
    /// The PulseAudio server, if it is not the user's own.
    pub pulse_server: Option<String>,
}

/// The capability.
#[derive(Debug)]
pub struct Tts {
    options: Options,
    configured: Provider,
    turn: Semaphore,
    /// Ends the speeches that have been asked for since the last interruption.
    interruption: Mutex<CancellationToken>,
}

impl Default for Tts {
    fn default() -> Self {
        Tts::new(Options::default())
    }
}

/// What is to be spoken, and how.
struct Speech<'a> {
    text: &'a str,
    voice: Option<&'a str>,
    choice: Choice,
}

/// Who speaks instead of whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    requested: Provider,
    provider: Provider,
}

impl Choice {
    /// The configured provider, or the system's if that one is not ready.
    fn default(configured: Provider, is_ready: impl Fn(Provider) -> bool) -> Option<Self> {
        let provider = [configured, Provider::System].into_iter().find(|provider| is_ready(*provider))?;
        Some(Choice { requested: configured, provider })
    }

    /// Whoever is asked for by name is never replaced by another.
    fn named(name: &str, is_ready: impl Fn(Provider) -> bool) -> Option<Self> {
        let provider = Provider::of(name).filter(|provider| is_ready(*provider))?;
        Some(Choice { requested: provider, provider })
    }

    fn fell_back(self) -> bool {
        self.requested != self.provider
    }
}

impl Tts {
    /// A capability with these options.
    pub fn new(options: Options) -> Self {
        let configured = options.provider.as_deref().map(|name| {
            let provider = Provider::of(name);
            if provider.is_none() {
                tracing::warn!("the speech provider of the settings is not known here; Piper is used");
            }
            provider.unwrap_or(Provider::Piper)
        });
        let configured = configured.unwrap_or(Provider::Piper);
        Tts { options, configured, turn: Semaphore::new(1), interruption: Mutex::default() }
    }

    fn is_ready(&self, provider: Provider) -> bool {
        provider.readiness(&self.options) == Readiness::Ready
    }

    fn can_speak(&self) -> bool {
        Provider::ALL.into_iter().any(|provider| self.is_ready(provider))
    }

    /// Who speaks if nobody is asked for by name.
    fn default_choice(&self) -> Option<Choice> {
        Choice::default(self.configured, |provider| self.is_ready(provider))
    }

    fn choose(&self, requested: Option<&str>) -> Result<Choice, &'static str> {
        if !self.can_speak() {
            return Err("TTS speak not available");
        }
        let choice = match requested.map(str::trim).filter(|name| !name.is_empty()) {
            None => self.default_choice(),
            Some(name) => Choice::named(name, |provider| self.is_ready(provider)),
        };
        choice.ok_or("Speak failed")
    }

    async fn speak(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let text = args.string("text").unwrap_or_default().trim();
        if text.is_empty() {
            return Response::failed("Missing required text");
        }
        if text.chars().count() > MAX_TEXT {
            return Response::failed(format!("TTS text exceeds {MAX_TEXT} characters."));
        }
        let [voice, model] =
            ["voiceId", "model"].map(|name| args.string(name).map(str::trim).filter(|text| !text.is_empty()));
        for (name, value) in [("voiceId", voice), ("model", model)] {
            if !value.is_none_or(is_name) {
                return Response::failed(format!("Invalid {name}"));
            }
        }
        let choice = match self.choose(args.string("provider")) {
            Ok(choice) => choice,
            Err(error) => return Response::failed(error),
        };
        // A voice of another provider.
        let voice = voice.filter(|_| !choice.fell_back());
        let interruption = self.begin(args.bool("interrupt").unwrap_or(false));
        let spoken = async {
            let turn = tokio::time::timeout(TURN_TIMEOUT, self.turn.acquire()).await;
            let _turn = turn.map_err(|_| "others speak for too long")?.map_err(|_| "nobody may speak")?;
            self.say(Speech { text, voice, choice }).await
        };
        tokio::select! {
            result = spoken => result.map_or_else(
                |error: String| {
                    tracing::warn!(provider = choice.provider.name(), error, "a speech failed");
                    Response::failed("Speak failed")
                },
                Response::done,
            ),
            () = interruption.cancelled() => Response::failed("Speak canceled"),
            () = cancel.cancelled() => Response::failed("Speak canceled"),
        }
    }

    /// What ends a new speech besides its caller. An interrupting one ends all that came before it.
    fn begin(&self, interrupts: bool) -> CancellationToken {
        let mut interruption = self.interruption.lock().expect("nothing panics while it is locked");
        if interrupts {
            std::mem::take(&mut *interruption).cancel();
        }
        interruption.clone()
    }

    async fn say(&self, speech: Speech<'_>) -> Result<Value, String> {
        let Speech { text, voice, choice } = speech;
        let scratch = blocking(Scratch::new).await?;
        let file = scratch.path().join("speech.wav");
        choice.provider.render(&self.options, text, voice, &file).await?;
        let (length, kept) = blocking({
            let (file, folder) = (file.clone(), self.options.output_dir.clone());
            move || {
                let length = wav::duration(&file)?;
                Ok((length, folder.map(|folder| keep(&file, &folder)).transpose()?))
            }
        })
        .await?;
        let spoken = playback::play(&file, length, self.options.pulse_server.as_deref()).await;
        let mut payload = json!({
            "spoken": spoken,
            "provider": choice.provider.name(),
            "requestedProvider": choice.requested.name(),
            "fellBack": choice.fell_back(),
            "contentType": "audio/wav",
            "durationMs": u64::try_from(length.as_millis()).unwrap_or(u64::MAX),
        });
        if let Some(path) = kept {
            payload["path"] = path.display().to_string().into();
        }
        Ok(payload)
    }

    fn status(&self) -> Value {
        let choice = self.default_choice();
        let providers = Provider::ALL.map(|provider| {
            let readiness = provider.readiness(&self.options);
            json!({
                "provider": provider.name(),
                "readiness": readiness.name(),
                "isReady": readiness == Readiness::Ready,
            })
        });
        json!({
            "configuredProvider": self.configured.name(),
            "effectiveProvider": choice.map(|choice| choice.provider.name()),
            "willFallBack": choice.is_some_and(Choice::fell_back),
            "providers": providers,
        })
    }
}

/// Does something where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())?;
    done.map_err(|error| error.to_string())
}

/// Copies a speech into the folder where they are kept.
fn keep(file: &Path, folder: &Path) -> std::io::Result<PathBuf> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let kept = folder.join(format!("speech-{time}-{}.wav", uuid::Uuid::new_v4().simple()));
    std::fs::create_dir_all(folder)?;
    std::fs::copy(file, &kept)?;
    Ok(kept)
}

impl Capability for Tts {
    fn category(&self) -> &str {
        "tts"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, command: &str) -> bool {
        command == "tts.status" || self.can_speak()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let (properties, required) = match command {
            "tts.speak" => (
                json!({
                    "text": { "type": "string", "maxLength": MAX_TEXT, "description": "What to say" },
                    "provider": {
                        "type": "string",
                        "enum": Provider::ALL.map(Provider::name),
                        "description": "Who speaks; tts.status says who is ready",
                    },
                    "voiceId": { "type": "string", "description": "A voice of the provider" },
                    "model": { "type": "string", "description": "A model of the provider" },
                    "interrupt": {
                        "type": "boolean",
                        "default": false,
                        "description": "Whether to end what is being spoken, instead of waiting for its end",
                    },
                }),
                vec!["text"],
            ),
            "tts.status" => (json!({}), vec![]),
            _ => return None,
        };
        Some(json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "tts.speak" => self.speak(&request.args, &cancel).await,
                "tts.status" => Response::done(self.status()),
                other => Response::unknown_command(other),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Provider::{ElevenLabs, Piper, System};

    #[test]
    fn only_a_provider_that_nobody_named_is_replaced() {
        let default = |configured, ready: &[Provider]| {
            Choice::default(configured, |provider| ready.contains(&provider)).map(|c| (c.provider, c.fell_back()))
        };
        assert_eq!(default(Piper, &[Piper, System]), Some((Piper, false)));
        assert_eq!(default(Piper, &[System]), Some((System, true)));
        assert_eq!(default(ElevenLabs, &[Piper, System]), Some((System, true)));
        assert_eq!(default(System, &[Piper, System]), Some((System, false)));
        assert_eq!(default(System, &[Piper]), None);
        assert_eq!(default(Piper, &[]), None);
        let named = |name: &str, ready: &[Provider]| {
            Choice::named(name, |provider| ready.contains(&provider)).map(|c| (c.provider, c.fell_back()))
        };
        assert_eq!(named(" PIPER ", &[Piper, System]), Some((Piper, false)));
        assert_eq!(named(System.name(), &[System]), Some((System, false)));
        assert_eq!(named("piper", &[System]), None);
        assert_eq!(named("elevenlabs", &[Piper, System]), None);
        assert_eq!(named("nobody", &[Piper, System]), None);
    }

    #[test]
    fn piper_is_ready_with_its_program_and_a_voice() {
        let here = std::env::current_exe().unwrap();
        let missing = || PathBuf::from("/no/such/file");
        let readiness = |piper, piper_voice| {
            let options = Options { piper: Some(piper), piper_voice, ..Options::default() };
            Piper.readiness(&options).name()
        };
        assert_eq!(readiness(missing(), Some(here.clone())), "unavailable");
        assert_eq!(readiness(here.clone(), None), "needs-voice");
        assert_eq!(readiness(here.clone(), Some(missing())), "voice-not-downloaded");
        assert_eq!(readiness(here.clone(), Some(here)), "ready");
        assert_eq!(ElevenLabs.readiness(&Options::default()).name(), "needs-api-key");
    }

    #[test]
    fn names_of_voices_are_neither_flags_nor_paths() {
        for name in ["en-us+f3", "en_US-joe-medium", "Microsoft Zira Desktop", "5"] {
            assert!(is_name(name), "{name}");
        }
        let long = "x".repeat(101);
        for text in ["", "-v", "--help", " x", ".hidden", "../x", "a/b", "a\\b", "a\nb", "$(x)", "a;b", &long] {
            assert!(!is_name(text), "{text}");
        }
    }
}
