//! Language tags.

/// A language to be recognized: `auto`, or a tag of language, script and region such as `de`, `zh-Hant` or `es-419`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Language(String);

impl Language {
    /// Reads a tag; nothing means `auto`.
    pub(super) fn parse(tag: Option<&str>) -> Option<Self> {
        let tag = tag.map(str::trim).filter(|tag| !tag.is_empty()).unwrap_or(AUTO);
        (tag.eq_ignore_ascii_case(AUTO) || is_tag(tag)).then(|| Language(tag.to_owned()))
    }

    /// The whole tag, as it was written.
    pub(super) fn tag(&self) -> &str {
        &self.0
    }

    /// Whether the recognizer is to find it out.
    pub(super) fn is_auto(&self) -> bool {
        self.0.eq_ignore_ascii_case(AUTO)
    }

    /// Its first part in small letters.
    pub(super) fn primary(&self) -> String {
        self.0.split('-').next().unwrap_or_default().to_ascii_lowercase()
    }
}

const AUTO: &str = "auto";

fn is_tag(tag: &str) -> bool {
    let is_letters = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphabetic());
    let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let is_language = |part: &str| (2..=3).contains(&part.len()) && is_letters(part);
    let is_script = |part: &str| part.len() == 4 && is_letters(part);
    let is_region = |part: &str| (part.len() == 2 && is_letters(part)) || (part.len() == 3 && is_digits(part));
    match tag.split('-').collect::<Vec<_>>()[..] {
        [language] => is_language(language),
        [language, other] => is_language(language) && (is_script(other) || is_region(other)),
        [language, script, region] => is_language(language) && is_script(script) && is_region(region),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_told_from_other_text() {
        for tag in ["auto", "Auto", "en", "deu", "en-US", "zh-Hant", "zh-Hant-TW", "es-419", " en "] {
            assert!(Language::parse(Some(tag)).is_some(), "{tag}");
        }
        for text in ["e", "engl", "en_US", "en-", "-en", "en-USA", "en-US-x", "en-4190", "zh-TW-Hant", "--help", "日本"]
        {
            assert_eq!(Language::parse(Some(text)), None, "{text}");
        }
        for none in [None, Some(""), Some("  ")] {
            assert!(Language::parse(none).is_some_and(|language| language.is_auto()));
        }
        let language = Language::parse(Some("zh-Hant-TW")).unwrap();
        assert_eq!((language.tag(), &*language.primary()), ("zh-Hant-TW", "zh"));
    }
}
