// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package client

import (
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// promptQPS and promptBurst are what kubelet itself may ask of the API server by default. After a reboot it has
	// all pods of the node prepared at once and gives each call 45 seconds: 100 claims of at most four requests are
	// through in six, where the program's other limit, 10 a second, would take nearly all of that and more as soon
	// as anything else is written.
	promptQPS   = 50
	promptBurst = 100
)

// Prompt is for requests that somebody waits for within a limit of time, such as kubelet. It has a limit of requests of
// its own, so that what is done in the background, by [kubernetes.Interface], cannot delay it.
type Prompt struct{ kubernetes.Interface }

func newPrompt(cfg *rest.Config) (Prompt, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.Burst, cfg.RateLimiter = promptQPS, promptBurst, nil
	clientset, err := newClientset(cfg)
	return Prompt{clientset}, err
}
