// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/Masterminds/semver/v3"
)

// check says why the repository as it is cannot be released as that version.
func check(ctx context.Context, repository, version string) error {
	v, err := semver.StrictNewVersion(version)
	if err != nil || v.Metadata() != "" {
		return fmt.Errorf("VERSION=%s is not a version such as 1.2.3 or 1.2.3-rc.1", version)
	}
	dirty, err := git(ctx, repository, "status", "--porcelain")
	if err != nil {
		return err
	}
	if dirty != "" {
		return fmt.Errorf("what is released is a commit, and this is not committed:\n%s", dirty)
	}
	if err := checkTags(ctx, repository, "v"+version); err != nil {
		return err
	}
	if v.Prerelease() != "" {
		return nil // no promise is made for its CRDs
	}
	return checkCRDs(repository, version)
}

// checkTags refuses the commit of another release, and another commit than that which has the tag.
func checkTags(ctx context.Context, repository, tag string) error {
	here, err := git(ctx, repository, "tag", "--points-at", "HEAD")
	if err != nil {
		return err
	}
	tags := strings.Fields(here)
	if slices.Contains(tags, tag) {
		return nil
	}
	for _, other := range tags {
		if _, err := semver.StrictNewVersion(strings.TrimPrefix(other, "v")); err == nil {
			return fmt.Errorf("this commit is tagged %s, and cannot be released as %s", other, tag)
		}
	}
	if found, err := git(ctx, repository, "tag", "--list", tag); err != nil || found != "" {
		return errors.Join(err, fmt.Errorf("the tag %s is of another commit: check that one out, or take another version", tag))
	}
	return nil
}

// checkCRDs refuses a release whose CRDs are not kept for the next one to be compared with.
func checkCRDs(repository, version string) error {
	const remedy = "run make release-crds VERSION=%[2]s, and commit what it writes"
	kept := filepath.Join(repository, "api", "released", "v"+version)
	present, err := filepath.Glob(filepath.Join(repository, "api", "crds", "*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range present {
		now, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if was, err := os.ReadFile(filepath.Join(kept, filepath.Base(file))); err != nil || !bytes.Equal(was, now) {
			return fmt.Errorf("api/released/v%[2]s does not have %[1]s as it is: "+remedy, filepath.Base(file), version)
		}
	}
	return nil
}

// readCommit asks what commit the repository is at, and of what time.
func (s *source) readCommit(ctx context.Context) error {
	out, err := git(ctx, s.repository, "log", "-1", "--format=%H %ct")
	if err != nil {
		return err
	}
	revision, seconds, _ := strings.Cut(out, " ")
	at, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return fmt.Errorf("time of commit %s: %w", revision, err)
	}
	s.revision, s.time = revision, time.Unix(at, 0).UTC()
	return nil
}

func git(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
	}
	if err != nil {
		return "", fmt.Errorf("git %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimRight(string(out), "\n"), nil
}
