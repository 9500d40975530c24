//! The programs that turn sound into text.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::language::Language;
use super::{Options, microphone};
use crate::node::capabilities::program::{self, Bounds};

/// How long turning the longest recording into text may take.
const TIMEOUT: Duration = Duration::from_secs(180);
/// The most bytes of a text.
const OUTPUT: usize = 256 * 1024;
/// The names of whisper.cpp's program.
const WHISPER: [&str; 2] = ["whisper-cli", "whisper-cpp"];
/// Where Debian's `pocketsphinx-en-us` puts its model.
const POCKETSPHINX_MODEL: &str = "/usr/share/pocketsphinx/model/en-us";

/// A recognizer that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Engine {
    /// whisper.cpp, with any language.
    Whisper { program: PathBuf, model: PathBuf },
    /// PocketSphinx, with American English. Much smaller, and understands much less.
    Pocketsphinx { program: PathBuf, model: PathBuf },
}

/// What was understood.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Heard {
    /// As the recognizer names it, if it found out.
    pub(super) language: Option<String>,
    /// In their order.
    pub(super) pieces: Vec<Piece>,
}

/// A piece of a text, and from when to when in the recording it was said, in milliseconds.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The engine to use, or which one is not ready and why.
pub(super) fn choose(options: &Options) -> Result<Engine, (&'static str, &'static str)> {
    let whisper = match &options.whisper {
        Some(program) => program::is_program(program).then(|| program.clone()),
        None => WHISPER.into_iter().find_map(program::find),
    };
    let pocketsphinx = program::find("pocketsphinx_continuous");
    let has_program = whisper.is_some() || pocketsphinx.is_some();
    let name = if whisper.is_some() || pocketsphinx.is_none() { "whisper" } else { "pocketsphinx" };
    if !microphone::is_there() {
        return Err((name, "unavailable"));
    }
    let model = options.whisper_model.clone().filter(|model| model.is_file());
    if let Some((program, model)) = whisper.zip(model) {
        return Ok(Engine::Whisper { program, model });
    }
    let model = options.pocketsphinx_model.clone().unwrap_or_else(|| POCKETSPHINX_MODEL.into());
    match pocketsphinx {
        Some(program) if model.is_dir() => Ok(Engine::Pocketsphinx { program, model }),
        _ if has_program => Err((name, "model-not-downloaded")),
        _ => Err((name, "unavailable")),
    }
}

impl Engine {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Engine::Whisper { .. } => "whisper",
            Engine::Pocketsphinx { .. } => "pocketsphinx",
        }
    }

    pub(super) fn knows(&self, language: &Language) -> bool {
        match self {
            Engine::Whisper { .. } => true,
            Engine::Pocketsphinx { .. } => ["auto", "en"].contains(&&*language.primary()),
        }
    }

    /// Turns `sound`, a WAV file of `milliseconds`, into text. It may write beside it.
    ///
    /// # Errors
    /// What went wrong, without what was said.
    pub(super) async fn recognize(
        &self,
        sound: &Path,
        milliseconds: usize,
        language: &Language,
    ) -> Result<Heard, String> {
        match self {
            Engine::Whisper { program, model } => {
                let result = sound.with_extension("");
                let mut command = Command::new(program);
                command.arg("--model").arg(model).arg("--file").arg(sound);
                command.args(["--language", &*language.primary(), "--output-json", "--output-file"]).arg(&result);
                run(command).await?;
                let result = sound.with_extension("json");
                let read = tokio::task::spawn_blocking(move || std::fs::read(result)).await;
                let json = read.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
                whisper_result(&json)
            }
            Engine::Pocketsphinx { program, model } => {
                let mut command = Command::new(program);
                command.arg("-hmm").arg(model.join("en-us")).arg("-lm").arg(model.join("en-us.lm.bin"));
                command.arg("-dict").arg(model.join("cmudict-en-us.dict")).arg("-infile").arg(sound);
                // Its log would hold what was said.
                command.args(["-logfn", if cfg!(windows) { "NUL" } else { "/dev/null" }]);
                let stdout = run(command).await?;
                let text = String::from_utf8_lossy(&stdout).split_whitespace().collect::<Vec<_>>().join(" ");
                // Its own times leave silence out.
                let pieces = (!text.is_empty()).then_some(Piece { text, start: 0, end: milliseconds });
                Ok(Heard { language: Some("en-US".to_owned()), pieces: pieces.into_iter().collect() })
            }
        }
    }
}

async fn run(command: Command) -> Result<Vec<u8>, String> {
    let bounds = Bounds { time: TIMEOUT, output: OUTPUT };
    // Dropped, when nobody listens any more.
    let ended = program::run(command, b"", bounds, &CancellationToken::new()).await;
    if ended.is_success() { Ok(ended.stdout.bytes) } else { Err(format!("the program ended with {:?}", ended.exit)) }
}

/// What whisper.cpp writes, as far as it matters.
#[derive(Deserialize)]
struct WhisperResult {
    result: WhisperLanguage,
    transcription: Vec<WhisperPiece>,
}

#[derive(Deserialize)]
struct WhisperLanguage {
    language: String,
}

#[derive(Deserialize)]
struct WhisperPiece {
    text: String,
    offsets: WhisperOffsets,
}

#[derive(Deserialize)]
struct WhisperOffsets {
    from: usize,
    to: usize,
}

fn whisper_result(json: &[u8]) -> Result<Heard, String> {
    // It may cut a character in two.
    let json = String::from_utf8_lossy(json);
    let result: WhisperResult = serde_json::from_str(&json).map_err(|_| "the result cannot be read")?;
    let pieces = result.transcription.into_iter().filter_map(|WhisperPiece { text, offsets }| {
        let text = text.trim();
        // "[BLANK_AUDIO]" and such.
        let is_remark = text.starts_with('[') && text.ends_with(']');
        let is_said = !text.is_empty() && !is_remark;
        is_said.then(|| Piece { text: text.to_owned(), start: offsets.from, end: offsets.to })
    });
    Ok(Heard { language: Some(result.result.language), pieces: pieces.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_whisper_writes_is_read() {
        let mut json = br#"{"systeminfo":"x","result":{"language":"de"},"transcription":[
            {"timestamps":{"from":"00:00:00,000"},"offsets":{"from":0,"to":1500},"text":" Guten Tag."},
            {"offsets":{"from":1500,"to":2000},"text":" [BLANK_AUDIO]"},
            {"offsets":{"from":2000,"to":2500},"text":" ?!"}]}"#
            .to_vec();
        // Half a character.
        let end = json.len() - 6;
        json[end] = 0xe4;
        let heard = whisper_result(&json).unwrap();
        let pieces: Vec<_> = heard.pieces.iter().map(|piece| (&*piece.text, piece.start, piece.end)).collect();
        assert_eq!(heard.language.as_deref(), Some("de"));
        assert_eq!(pieces, [("Guten Tag.", 0, 1500), ("\u{fffd}!", 2000, 2500)]);
        assert!(whisper_result(b"canary").is_err_and(|error| !error.contains("canary")));
    }
}
