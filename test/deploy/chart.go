// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package deploy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/cilium/networkdriver/test/lab"
)

// ImportImages imports the images that make images has put into a directory on each node, for its architecture.
func (c *Cluster) ImportImages(ctx context.Context, dir string) error {
	images, err := filepath.Glob(filepath.Join(dir, "*-linux-amd64.tar"))
	if err != nil {
		return err
	}
	if len(images) == 0 {
		return fmt.Errorf("%s has no images: make images makes them", dir)
	}
	for _, image := range images {
		data, err := os.ReadFile(image)
		if err != nil {
			return err
		}
		name := filepath.Base(image)
		shared := filepath.Join(c.ShareDir(), name)
		if err := os.WriteFile(shared, data, 0o644); err != nil {
			return err
		}
		var wg sync.WaitGroup
		errs := make([]error, len(c.Nodes()))
		for i, n := range c.Nodes() {
			wg.Go(func() {
				if _, err := n.Run(ctx, "ctr --namespace k8s.io images import --local "+filepath.Join(lab.ShareDir, name)); err != nil {
					errs[i] = fmt.Errorf("import %s on %s: %w", name, n.Name(), err)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		if err := os.Remove(shared); err != nil {
			return err
		}
	}
	return nil
}

// Shell runs a script of a user of the cluster in the repository's directory, with kubectl and helm on the PATH. Its
// output, that of errors included, is returned and, if w is not nil, written there as it comes.
func (c *Cluster) Shell(ctx context.Context, repository, script string, w io.Writer) (string, error) {
	var env bytes.Buffer
	if err := c.WriteEnv(&env); err != nil {
		return "", err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", env.String()+"PATH=bin:$PATH\n"+script)
	cmd.Dir = repository
	// Helm has its caches with the lab's data, not in the home of who runs it.
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+filepath.Join(c.StateDir(), "helm"),
		"HELM_CONFIG_HOME="+filepath.Join(c.StateDir(), "helm"), "HELM_DATA_HOME="+filepath.Join(c.StateDir(), "helm"))
	cmd.Stdout = &out
	if w != nil {
		cmd.Stdout = io.MultiWriter(&out, w)
	}
	cmd.Stderr = cmd.Stdout
	err := cmd.Run()
	return out.String(), err
}
